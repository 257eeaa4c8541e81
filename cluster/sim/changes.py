"""What changes in a simulated cluster while it runs. Pure.

Workers and pool nodes that die, and others that come in their place: routers hear of it as live
ones do whose connection breaks, and so do a worker's peers and the workers of a pool node. What is
on its way to a dead worker is lost; so is what it had on its way when it comes to somebody who
knows.

Workers that change their role as the offered work asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.config.schema import Config
from cluster.config.simulation import FailureSection
from cluster.core.desired import pool_of
from cluster.core.elastic.roles import Busy, Fleet, RoleController, RolePolicy, who_changes
from cluster.core.plan import role_rules
from cluster.sim.machines.clock import Clock
from cluster.sim.pools import SimPools
from cluster.sim.router import SimRouter
from cluster.sim.worker import SimWorker
from kvpool.core.transfer.commands import PeerLost
from kvrelay.errors import ConfigError
from kvrelay.types import Incarnation, Role
from router.core.load.needs import model_of
from router.core.load.offered import OfferedWork

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


EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    at_s: float
    worker: str
    role: Role


@dataclass(slots=True, kw_only=True)
class SimElastic:
    """`goes_on`: there is still something to serve."""

    clock: Clock
    config: Config
    routers: Sequence[SimRouter]
    workers: Mapping[Incarnation, SimWorker]
    goes_on: Callable[[], bool]
    policy: RolePolicy | None = None
    flips: list[Flip] = field(default_factory=list)

    def begin(self) -> None:
        """`policy` decides, else a cluster's own if the file says so."""
        flexible = self._flexible
        if self.policy is None and flexible:
            fixed = Counter(one.core.role for one in self._living if one not in flexible)
            rules = role_rules(self.config.elastic)
            rules = rules.with_fixed(prefill=fixed[Role.PREFILL], decode=fixed[Role.DECODE])
            self.policy = RoleController(model=model_of(flexible[0].hello), rules=rules)
        if self.policy is not None:
            self.clock.at(0.0, self._look)

    def _look(self, _: None) -> None:
        assert self.policy is not None
        offered = sum((one.core.state.offered.total for one in self.routers), OfferedWork())
        fleet = Fleet(
            prefill=len(self._of(Role.PREFILL)),
            decode=len(self._of(Role.DECODE)),
            running=sum(map(_running, self._of(Role.DECODE))),
        )
        wanted = self.policy.look(offered, fleet, self.clock.now_s)
        if wanted is not None:
            self._change(wanted - fleet.prefill)
        if self.goes_on():
            self.clock.after(EVERY_S, self._look)

    def _of(self, role: Role) -> list[SimWorker]:
        return [worker for worker in self._living if worker.core.role is role]

    @property
    def _living(self) -> list[SimWorker]:
        return [worker for worker in self.workers.values() if not worker.is_dead]

    @property
    def _flexible(self) -> list[SimWorker]:
        """Those of pools whose workers take either role."""
        pools = {pool.label for pool in self.config.workers if pool.role is None}
        return [worker for worker in self._living if pool_of(worker.name) in pools]

    def _change(self, more_prefill: int) -> None:
        names, role = who_changes(map(_busy, self._flexible), more_prefill)
        for worker in [one for one in self._flexible if one.name in names]:
            self.flips.append(Flip(at_s=self.clock.now_s, worker=worker.name, role=role))
            worker.core.take_role(role)
            worker.hear(())


def _busy(worker: SimWorker) -> Busy:
    role = worker.core.role
    work = _running(worker) if role is Role.DECODE else worker.core.prefill.queue.tokens
    return Busy(name=worker.name, role=role, work=work)


def _running(worker: SimWorker) -> int:
    return len(worker.core.decode.batch.running_set.running)
