"""Simulated workers that die, and others that come in their place.

Routers hear of it as live ones do whose connection breaks, and so do its peers. What is on its way
to a dead worker is lost; so is what it had on its way when it comes to somebody who knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.config.simulation import FailureSection
from cluster.sim.machines.clock import Clock
from cluster.sim.router import SimRouter
from cluster.sim.worker import SimWorker
from kvpool.core.transfer.commands import PeerLost
from kvrelay.errors import ConfigError
from kvrelay.types import Incarnation

REASON = "its process died"


@dataclass(slots=True, kw_only=True)
class Failures:
    """`again` makes the n-th life of the worker of that name, and connects it."""

    clock: Clock
    routers: Sequence[SimRouter]
    workers: Mapping[Incarnation, SimWorker]  # of all lives
    peer_latency_s: float
    again: Callable[[str, int], SimWorker]
    _lives: dict[str, SimWorker] = field(default_factory=dict)  # name |-> its latest
    _count: dict[str, int] = field(default_factory=dict)

    def begin(self, failures: Sequence[FailureSection]) -> None:
        self._lives = {worker.name: worker for worker in self.workers.values()}
        for one in failures:
            self.clock.at(one.at, self._die, one)

    def _die(self, failure: FailureSection) -> None:
        worker = self._lives[failure.worker]
        if worker.is_dead:
            return
        worker.die()
        for router in self.routers:
            router.later_lost(worker.incarnation)
        lost = PeerLost(peer=worker.incarnation, reason=REASON)
        for other in self.workers.values():
            self.clock.after(self.peer_latency_s, other.hear, (lost,))
        if failure.back_after is not None:
            self.clock.after(failure.back_after, self._return, failure.worker)

    def _return(self, name: str) -> None:
        life = self._count[name] = self._count.get(name, 0) + 1
        self._lives[name] = self.again(name, life)


def check_failures(failures: Sequence[FailureSection], names: Sequence[Sequence[str]]) -> None:
    """Raises ConfigError."""
    known = [name for pool in names for name in pool]
    for index, one in enumerate(failures):
        if one.worker not in known:
            raise ConfigError(
                f"simulation.failures.{index}.worker: got {one.worker}, expected one of "
                + ", ".join(known)
            )
