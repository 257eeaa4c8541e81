"""Which workers have been silent for too long, as one router counts it. Pure.

    heard --2 s--> suspect --failure.detect--> lost
    suspect ------- a report ----------------> heard

A worker reports every half second, even with nothing to do. A pause of the router itself counts for
nothing: the reports that came meanwhile are still to be read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.own_time import OwnTime
from kvrelay.types import Incarnation

DETECT_S = 5.0
"""The default of `failure.detect`."""
LEAST_DETECT_S = 1.0
SUSPECT_S = 2.0
"""With a `failure.detect` below twice as much, suspicion comes after half of it."""
PERIOD_S = 0.25
"""Between two looks."""


@dataclass(slots=True)
class _Worker:
    silent_s: float = 0.0
    is_suspect: bool = False


@dataclass(slots=True, kw_only=True)
class Silence:
    now_s: float
    detect_s: float = DETECT_S
    _workers: dict[Incarnation, _Worker] = field(default_factory=dict)
    _own_time: OwnTime = field(init=False)

    def __post_init__(self) -> None:
        assert self.detect_s >= LEAST_DETECT_S, self.detect_s
        self._own_time = OwnTime(most_s=2 * PERIOD_S, looked_s=self.now_s)

    @property
    def suspect_s(self) -> float:
        return min(SUSPECT_S, self.detect_s / 2)

    def joined(self, worker: Incarnation) -> None:
        self._workers[worker] = _Worker()

    def left(self, worker: Incarnation) -> None:
        self._workers.pop(worker, None)

    def heard(self, worker: Incarnation) -> None:
        known = self._workers.get(worker)
        if known is not None:
            known.silent_s, known.is_suspect = 0.0, False

    def look(self, now_s: float) -> tuple[list[Incarnation], list[Incarnation]]:
        """(those that are suspect since this look, those that are lost and forgotten)"""
        passed_s = self._own_time.since_last(now_s)
        for worker in self._workers.values():
            worker.silent_s += passed_s
        lost = [name for name, w in self._workers.items() if w.silent_s > self.detect_s]
        for name in lost:
            del self._workers[name]
        suspects = [
            name
            for name, w in self._workers.items()
            if w.silent_s > self.suspect_s and not w.is_suspect
        ]
        for name in suspects:
            self._workers[name].is_suspect = True
        return suspects, lost
