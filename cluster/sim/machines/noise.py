"""By how much steps last longer or shorter than a hardware profile says. Pure.

Drawn: log-normal factors of mean 1, the same process for all steps of a worker. Its logarithm is an
Ornstein-Uhlenbeck process in virtual time, looked at when each step begins.

Replayed: what live workers recorded, actual by predicted seconds, in stretches as they followed one
another (a block bootstrap; Kuensch, 1989), so that what is slow for a while stays so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, sqrt
from typing import Literal, Protocol

StepKind = Literal["prefill", "decode"]
Draw = Callable[[], float]


class StepNoise(Protocol):
    """Of one worker. Steps of a run are drawn ahead: `cut` says how many of those since `begin`
    were run after all."""

    def begin(self) -> None: ...

    def factor(self, kind: StepKind, at_s: float) -> float:
        """Of a step that begins then."""

    def cut(self, steps: int) -> None: ...


@dataclass(slots=True, kw_only=True)
class DrawnNoise:
    """`gauss` draws standard normal numbers."""

    sigma: float
    correlation_s: float
    gauss: Draw
    _value: float = 0.0
    _at_s: float = -inf
    _run: list[tuple[float, float]] = field(default_factory=list)  # value and time of each step

    def begin(self) -> None:
        self._run.clear()

    def factor(self, kind: StepKind, at_s: float) -> float:
        kept = exp((self._at_s - at_s) / self.correlation_s) if self.correlation_s else 0.0
        self._value = kept * self._value + sqrt(1 - kept * kept) * self.gauss()
        self._at_s = at_s
        self._run.append((self._value, at_s))
        return exp(self.sigma * self._value - self.sigma**2 / 2)

    def cut(self, steps: int) -> None:
        self._value, self._at_s = self._run[steps - 1]


STRETCH_STEPS = 512
"""A stretch of recorded steps: some seconds of a worker that is busy."""


@dataclass(slots=True, kw_only=True)
class ReplayedNoise:
    """`recorded`: # kind |-> actual by predicted seconds, in order. `uniform` draws from 0 to 1."""

    recorded: Mapping[StepKind, Sequence[float]]
    uniform: Draw
    _next: dict[StepKind, tuple[int, int]] = field(default_factory=dict)  # where, how many are left
    _run: list[tuple[StepKind, tuple[int, int]]] = field(default_factory=list)

    def begin(self) -> None:
        self._run.clear()

    def factor(self, kind: StepKind, at_s: float) -> float:
        known = self.recorded[kind]
        if not known:
            return 1.0
        at, left = self._next.get(kind, (0, 0))
        if not left:
            at, left = int(self.uniform() * len(known)), STRETCH_STEPS
        self._next[kind] = (at + 1) % len(known), left - 1
        self._run.append((kind, self._next[kind]))
        return known[at]

    def cut(self, steps: int) -> None:
        if self._run:
            kind, then = self._run[steps - 1]
            self._next[kind] = then
