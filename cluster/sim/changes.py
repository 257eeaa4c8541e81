"""Workers and pool nodes that die, and others that come in their place. Pure.

Routers hear of it as live ones do whose connection breaks, and so do a worker's peers and the
workers of a pool node. What is on its way to a dead worker is lost; so is what it had on its way
when it comes to somebody who knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.config.simulation import FailureSection
from cluster.sim.machines.clock import Clock
from cluster.sim.pools import SimPools
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
    pools: SimPools | None
    _lives: dict[str, SimWorker] = field(default_factory=dict)  # name |-> its latest
    _count: dict[str, int] = field(default_factory=dict)

    def begin(self, failures: Sequence[FailureSection]) -> None:
        self._lives = {worker.name: worker for worker in self.workers.values()}
        for one in failures:
            self.clock.at(one.at, self._die if one.pool_node is None else self._node_dies, one)

    def _node_dies(self, failure: FailureSection) -> None:
        assert self.pools is not None and failure.pool_node is not None, "checked"
        was_there = self.pools.kill(failure.pool_node)
        if was_there and failure.back_after is not None:
            self.clock.after(failure.back_after, self.pools.start, failure.pool_node)

    def _die(self, failure: FailureSection) -> None:
        assert failure.worker is not None, "checked"
        worker = self._lives[failure.worker]
        if worker.is_dead:
            return
        self.end(worker)
        if failure.back_after is not None:
            self.clock.after(failure.back_after, self._return, failure.worker)

    def end(self, worker: SimWorker) -> None:
        """All who know it hear of it."""
        worker.die()
        for router in self.routers:
            router.later_lost(worker.incarnation)
        lost = PeerLost(peer=worker.incarnation, reason=REASON)
        for other in self.workers.values():
            self.clock.after(self.peer_latency_s, other.hear, (lost,))

    def _return(self, name: str) -> None:
        life = self._count[name] = self._count.get(name, 0) + 1
        self._lives[name] = self.again(name, life)


def check_failures(
    failures: Sequence[FailureSection], names: Sequence[Sequence[str]], nodes: Sequence[str]
) -> None:
    """`nodes` are the names of the pool nodes. Raises ConfigError."""
    workers = [name for pool in names for name in pool]
    for index, one in enumerate(failures):
        if one.worker is not None:
            _check_name(f"{index}.worker", one.worker, workers)
        elif one.pool_node is not None:
            _check_name(f"{index}.pool_node", one.pool_node, nodes)


def _check_name(key: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        expected = f"expected one of {', '.join(known)}" if known else "but the cluster has no pool"
        raise ConfigError(f"simulation.failures.{key}: got {name}, {expected}")
