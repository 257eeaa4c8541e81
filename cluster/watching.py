"""Who gives no sign of life: the processes that are asked for one, and the driver. Pure.

A pause of the supervisor itself is nobody's silence: what was said meanwhile is still to be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.supervised import Process
from cluster.supervision import Ping

PINGS = 4
"""In the time after which one that is silent is given up."""
COUNTED_S = 1.0
"""Between two looks at the driver at most so much counts as its silence: the supervisor looks
twice a second, unless it stands still itself."""


@dataclass(slots=True, kw_only=True)
class Watching:
    """Looks as often as it likes. If it stood still itself, nobody else is blamed for that."""

    timeout_s: float
    looked_s: float

    def look(self, serving: Sequence[Process], now_s: float) -> tuple[list[Ping], list[Process]]:
        """(whom to ask, who has been silent for too long)"""
        stood_still = now_s - self.looked_s > self.timeout_s / PINGS
        self.looked_s = now_s
        for process in serving if stood_still else ():
            process.asked_s = None if process.asked_s is None else now_s
        due = [p for p in serving if self._is_due(p, now_s)]
        silent = [p for p in serving if self._is_silent(p, now_s)]
        for process in due:
            process.asked_s = now_s
        return [Ping(process.name, process.life) for process in due], silent

    def _is_due(self, process: Process, now_s: float) -> bool:
        return process.asked_s is None and now_s - process.heard_s >= self.timeout_s / PINGS

    def _is_silent(self, process: Process, now_s: float) -> bool:
        return process.asked_s is not None and now_s - process.asked_s >= self.timeout_s


@dataclass(slots=True, kw_only=True)
class DriverWatch:
    """`timeout_s` is None when the cluster outlives its driver."""

    timeout_s: float | None
    looked_s: float
    silent_s: float = 0.0

    def hears(self, now_s: float) -> None:
        self.looked_s, self.silent_s = now_s, 0.0

    def is_gone(self, now_s: float) -> bool:
        self.silent_s += min(now_s - self.looked_s, COUNTED_S)
        self.looked_s = now_s
        return self.timeout_s is not None and self.silent_s > self.timeout_s
