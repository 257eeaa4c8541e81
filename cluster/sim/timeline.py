"""Queues over time: looked at now and then while a simulation runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cluster.sim.machines.clock import Clock
from cluster.sim.worker import SimWorker

LOOKS = 240
"""Over the time in which requests arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePoint:
    at_s: float
    awaiting_prefill: int
    prefill_tokens: int
    decoding: int
    awaiting_decode: int
    free_blocks: int


@dataclass(slots=True)
class Timeline:
    """`goes_on`: there is still something to see."""

    clock: Clock
    workers: Iterable[SimWorker]
    every_s: float
    goes_on: Callable[[], bool]
    looks: list[TimelinePoint] = field(default_factory=list)

    def begin(self) -> None:
        self.clock.at(0.0, self._look)

    def _look(self, _: None) -> None:
        self.looks.append(self._now())
        if self.goes_on():
            self.clock.after(self.every_s, self._look)

    def _now(self) -> TimelinePoint:
        cores = [worker.core for worker in self.workers if not worker.is_dead]
        queues = [queue for core in cores if len(queue := core.prefill.queue)]
        running_sets = [core.decode.batch.running_set for core in cores]
        busy = [one for one in running_sets if not one.is_empty]
        return TimelinePoint(
            at_s=self.clock.now_s,
            awaiting_prefill=sum(len(queue) for queue in queues),
            prefill_tokens=sum(queue.tokens for queue in queues),
            decoding=sum(len(one.running) for one in busy),
            awaiting_decode=sum(len(one.awaiting_prefill) for one in busy),
            free_blocks=sum([one.tables.free_blocks for one in running_sets]),
        )
