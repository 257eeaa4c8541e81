"""What will be needed when a worker that starts now has started. Pure.

Three ways to foresee: the last value; Holt's linear trend, damped (Gardner and McKenzie 1985); the
value of the same time in the last period, times how this period compares. Each is tried on what
has come since: the one with the least mean error is used, and only if it beats the last value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

DAY_S = 24 * 3600.0
EVERY_S = 5.0
LEVEL, TREND, DAMPING = 0.3, 0.05, 0.98
REMEMBERED = 720
"""Errors of each way, for its mean and for the quantile of the one that is used."""
FIRST, FIRST_ROOM = 24, 120
"""Errors before any way but the last value may be used, and before errors ask for room."""
LEADS = 12
"""Starts, one after another, that also have to be over before errors ask for room: one change is an
error for as long as a start takes, and would be more than a tenth of fewer."""
BETTER = 0.95
"""Of the last value's error."""
MOST_ROOM = 0.5
NINE_OF_TEN = 1.28
"""Standard deviations, of a normal distribution."""


class Foresees(Protocol):
    def note(self, value: float) -> None:
        """The next one of evenly spaced values."""

    def ahead(self, steps: int) -> float: ...


@dataclass(slots=True)
class LastValue:
    value: float = 0.0

    def note(self, value: float) -> None:
        self.value = value

    def ahead(self, steps: int) -> float:
        return self.value


@dataclass(slots=True)
class Holt:
    level: float | None = None
    trend: float = 0.0

    def note(self, value: float) -> None:
        if self.level is None:
            self.level = value
            return
        before, foreseen = self.level, self.level + DAMPING * self.trend
        self.level = LEVEL * value + (1 - LEVEL) * foreseen
        self.trend = TREND * (self.level - before) + (1 - TREND) * DAMPING * self.trend

    def ahead(self, steps: int) -> float:
        damped = DAMPING * (1 - DAMPING**steps) / (1 - DAMPING)
        return max(0.0, (self.level or 0.0) + self.trend * damped)


@dataclass(slots=True)
class Seasonal:
    """`period`: in values. `smooth`: how many are compared with those of a period ago."""

    period: int
    smooth: int = 6
    _seen: deque[float] = field(default_factory=deque)

    def note(self, value: float) -> None:
        self._seen.append(value)
        if len(self._seen) > self.period + self.smooth:
            self._seen.popleft()

    def ahead(self, steps: int) -> float:
        """The last value, before a period has passed."""
        seen = self._seen
        if len(seen) < self.period + self.smooth or steps > self.period:
            return seen[-1] if seen else 0.0
        now = sum(seen[-1 - n] for n in range(self.smooth))
        then = sum(seen[n] for n in range(self.smooth))
        return seen[self.smooth - 1 + steps] * (now / then if then else 1.0)


@dataclass(slots=True)
class _Tried:
    """`waiting`: what was foreseen for the values that come next."""

    way: Foresees
    waiting: deque[float] = field(default_factory=deque)
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def note(self, value: float, steps: int) -> None:
        while len(self.waiting) >= max(1, steps):
            self.errors.append(value - self.waiting.popleft())
        self.way.note(value)
        self.waiting.append(self.way.ahead(steps))

    @property
    def error(self) -> float:
        return sum(map(abs, self.errors)) / len(self.errors) if self.errors else 0.0


@dataclass(slots=True)
class Forecast:
    """Of one series. `period_s`: after which it is taken to repeat."""

    period_s: float
    _tried: dict[str, _Tried] = field(init=False)
    _next_s: float | None = None

    def __post_init__(self) -> None:
        seasonal = Seasonal(round(self.period_s / EVERY_S))
        ways: dict[str, Foresees] = {"last": LastValue(), "holt": Holt(), "seasonal": seasonal}
        self._tried = {name: _Tried(way) for name, way in ways.items()}

    def note(self, now_s: float, value: float, lead_s: float) -> None:
        """As often as one likes; values count every `EVERY_S`."""
        if self._next_s is not None and now_s < self._next_s:
            return
        self._next_s = now_s + EVERY_S if self._next_s is None else self._next_s + EVERY_S
        for one in self._tried.values():
            one.note(value, _steps(lead_s))

    def ahead(self, lead_s: float) -> float:
        return self._tried[self.used].way.ahead(_steps(lead_s))

    def change(self, lead_s: float) -> float:
        """What is foreseen over the last value: 1 where that is the best that is known."""
        last = self._tried["last"].way.ahead(1)
        return self.ahead(lead_s) / last if last > 0 else 1.0

    @property
    def used(self) -> str:
        last = self._tried["last"]
        if len(last.errors) < FIRST:
            return "last"
        best = min(self._tried, key=lambda name: self._tried[name].error)
        return best if self._tried[best].error < BETTER * last.error else "last"

    def room(self, value: float, lead_s: float) -> float:
        """Nine of ten times, no more than this share of `value` was needed beyond what had been
        foreseen. Before there is enough to tell: nothing."""
        errors = self._tried[self.used].errors
        if len(errors) < _first_room(_steps(lead_s)) or value <= 0:
            return 0.0
        return min(MOST_ROOM, max(0.0, _p90(errors) / value))


def room_for(chance: float) -> float:
    """`chance`: a standard deviation, as a share. Nine of ten times it is no more than this."""
    return min(MOST_ROOM, NINE_OF_TEN * chance)


def _first_room(steps: int) -> int:
    return min(REMEMBERED, max(FIRST_ROOM, LEADS * steps))


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[int(0.9 * (len(values) - 1))]


def _steps(lead_s: float) -> int:
    return max(1, round(lead_s / EVERY_S))
