"""Which processes have been silent, or starting, for too long. Pure.

Only time in which the supervisor itself ran counts: while it stands still, nobody is silent, as
their messages are still to be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.core.processes import Process
from cluster.core.supervision import PingProcess
from engine.core.own_time import OwnTime

PINGS = 4
"""Pings to a silent process before it is given up."""
COUNTED_S = 1.0
"""Between two looks at most this much counts. The supervisor looks twice a second."""


class HangWatch:
    """Pings processes that serve."""

    def __init__(self, timeout_s: float, now_s: float) -> None:
        self.timeout_s = timeout_s
        self._own_time = OwnTime(most_s=COUNTED_S, looked_s=now_s)

    def look(
        self, serving: Sequence[Process], now_s: float
    ) -> tuple[list[PingProcess], list[Process]]:
        """(processes to ping, processes that have been silent for too long)"""
        passed_s = self._own_time.since_last(now_s)
        asked = [p for p in serving if p.silent_s is not None]
        for process in asked:
            assert process.silent_s is not None
            process.silent_s += passed_s
        due = [p for p in serving if self._is_due(p, now_s)]
        for process in due:
            process.silent_s = 0.0
        return [PingProcess(p.name, p.life) for p in due], [p for p in asked if self._is_silent(p)]

    def _is_due(self, process: Process, now_s: float) -> bool:
        return process.silent_s is None and now_s - process.heard_s >= self.timeout_s / PINGS

    def _is_silent(self, process: Process) -> bool:
        return process.silent_s is not None and process.silent_s >= self.timeout_s


class StartWatch:
    """A process that hangs while it starts answers no ping yet."""

    def __init__(self, timeout_s: float, now_s: float) -> None:
        self.timeout_s = timeout_s
        self._own_time = OwnTime(most_s=COUNTED_S, looked_s=now_s)
        self._passed_s = 0.0

    def look(self, processes: Iterable[Process], now_s: float) -> list[Process]:
        """Those that have been starting for too long. A wait for resources has no limit."""
        passed_s = self._own_time.since_last(now_s)
        self._passed_s += passed_s
        starting = [p for p in processes if p.is_busy_starting]
        for process in starting:
            process.starting_s += passed_s
        return [p for p in starting if p.starting_s > self.timeout_s]

    def is_over(self) -> bool:
        """The whole cluster has had as much time, waits included."""
        return self._passed_s > self.timeout_s
