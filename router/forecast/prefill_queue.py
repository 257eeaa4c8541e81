"""The prompts that this router has sent to one worker, and how long a new one will wait. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from kvrelay.types import RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """A prompt that will take `seconds`; a lower `priority` number goes first."""

    seconds: float
    tokens: int
    priority: int = 0


@dataclass(slots=True)
class PrefillQueue:
    """The worker is taken to work on something whenever there is something."""

    tokens: int = 0
    _ahead: dict[RequestKey, Ahead] = field(default_factory=dict)  # in the order sent
    _seconds: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    _since_s: float = 0.0  # when the worker turned to what it works on

    def __len__(self) -> int:
        return len(self._ahead)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._ahead

    def add(self, key: RequestKey, ahead: Ahead, now_s: float) -> None:
        assert key not in self._ahead, f"{key} waits here already"
        if not self._ahead:
            self._since_s = now_s
            self._seconds.clear()  # and with it what rounding left
        self._ahead[key] = ahead
        self._seconds[ahead.priority] += ahead.seconds
        self.tokens += ahead.tokens

    def remove(self, key: RequestKey, now_s: float) -> None:
        """It is prefilled, or given up; removing what isn't there changes nothing."""
        ahead = self._ahead.pop(key, None)
        if ahead is None:
            return
        self._seconds[ahead.priority] -= ahead.seconds
        self.tokens -= ahead.tokens
        self._since_s = now_s

    def wait_s(self, priority: int, now_s: float) -> float:
        """Until a prompt of this priority would be next."""
        if not self._ahead:
            return 0.0
        before_s = 0.0
        for other, seconds in self._seconds.items():
            if other <= priority:
                before_s += seconds
        first = next(iter(self._ahead.values()))
        begun_s = min(now_s - self._since_s, first.seconds)
        left_s = before_s - begun_s if begun_s > 0 else before_s
        return left_s if left_s > 0 else 0.0
