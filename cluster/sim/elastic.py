"""Workers that change their role, come and leave, as the offered work asks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.core.elastic.controller import ElasticPolicy
from cluster.core.elastic.fleet import STARTS, Busy, Counts, fleet_of, who_changes, who_leaves
from cluster.core.elastic.starts import Settling
from cluster.sim.machines.clock import Clock
from cluster.sim.router import SimRouter
from cluster.sim.worker import SimWorker
from kvrelay.types import Incarnation, Role
from router.core.load.offered import OfferedWork

EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    at_s: float
    worker: str
    role: Role


@dataclass(slots=True, kw_only=True)
class Life:
    """From the decision to start it until it has left; a worker that was there began at 0. `role`:
    with which it starts."""

    role: Role
    since_s: float = 0.0
    worker: str | None = None
    until_s: float | None = None

    def seconds(self, ended_s: float) -> float:
        """Those in which it starts and leaves included."""
        until_s = ended_s if self.until_s is None else min(self.until_s, ended_s)
        return max(0.0, until_s - self.since_s)


@dataclass(slots=True, kw_only=True)
class SimElastic:
    """`may_change`: the workers of pools that follow the work. `start` makes one more worker of a
    role, which serves from then on; it takes `start_s`. `end`: all hear that one has left.
    `goes_on`: there is still something to serve."""

    clock: Clock
    policy: ElasticPolicy | None
    routers: Sequence[SimRouter]
    workers: Mapping[Incarnation, SimWorker]
    may_change: Callable[[], Sequence[SimWorker]]
    start: Callable[[Role], SimWorker]
    start_s: float
    end: Callable[[SimWorker], None]
    goes_on: Callable[[], bool]
    flips: list[Flip] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    _settling: Settling = field(default_factory=Settling)

    def begin(self) -> None:
        self.lives = [Life(role=one.core.role, worker=one.name) for one in self.workers.values()]
        if self.policy is not None:
            self.clock.at(0.0, self._look)

    def _look(self, _: None) -> None:
        assert self.policy is not None
        offered = sum((one.core.state.offered.total for one in self.routers), OfferedWork())
        self._settling.hear(self._told(), self.clock.now_s)
        there, starting = map(_busy, self._there), self._still_starting()
        fleet = fleet_of(there, starting, settle_s=self._settling.p90_s)
        decision = self.policy.look(offered, fleet, self.clock.now_s)
        if decision.prefill is not None:
            self._change(decision.prefill - fleet.prefill)
        elif decision.counts is not None:
            self._resize(fleet.all, decision.counts)
        if self.goes_on():
            self.clock.after(EVERY_S, self._look)

    def _told(self) -> dict[str, list[Role]]:
        """# worker |-> its role, as each router knows it"""
        told: dict[str, list[Role]] = {}
        for router in self.routers:
            for view in router.core.state.workers.values():
                told.setdefault(view.hello.name, []).append(view.own_role)
        return told

    @property
    def _starting(self) -> list[Life]:
        return [life for life in self.lives if life.worker is None and life.until_s is None]

    @property
    def _there(self) -> list[SimWorker]:
        """Those that leave count no more."""
        return [w for w in self.workers.values() if not (w.is_dead or w.core.draining)]

    @property
    def _may_change(self) -> list[SimWorker]:
        return [one for one in self.may_change() if one in self._there]

    def _change(self, more_prefill: int) -> None:
        names, role = who_changes(map(_busy, self._may_change), more_prefill)
        for worker in self._named(names):
            self.flips.append(Flip(at_s=self.clock.now_s, worker=worker.name, role=role))
            self._settling.asked(worker.name, role, self.clock.now_s)
            worker.core.take_role(role)
            worker.hear(())

    def _resize(self, have: Counts, wanted: Counts) -> None:
        for role, more in (
            (Role.PREFILL, wanted.prefill - have.prefill),
            (Role.DECODE, wanted.decode - have.decode),
        ):
            for _ in range(more):
                self.lives.append(Life(role=role, since_s=self.clock.now_s))
                self.clock.after(self.start_s, self._join, self.lives[-1])
        names = who_leaves([*self._still_starting(), *map(_busy, self._may_change)], have, wanted)
        for life in self.lives:
            if str(id(life)) in names:
                life.until_s = self.clock.now_s
        for worker in self._named(names):
            worker.core.drain()
            worker.hear(())
            self._leave(worker)

    def _still_starting(self) -> list[Busy]:
        return [Busy(name=str(id(one)), role=one.role, work=STARTS) for one in self._starting]

    def _named(self, names: Iterable[str]) -> list[SimWorker]:
        return [one for one in self._there if one.name in names]

    def _join(self, life: Life) -> None:
        if life.until_s is not None:
            return
        life.worker = self.start(life.role).name

    def _leave(self, worker: SimWorker) -> None:
        """When what it had runs elsewhere."""
        if worker.is_dead:
            return
        if not worker.core.empty:
            self.clock.after(EVERY_S, self._leave, worker)
            return
        self.end(worker)
        for life in self.lives:
            if life.worker == worker.name:
                life.until_s = self.clock.now_s


def _busy(worker: SimWorker) -> Busy:
    role = worker.core.role
    running = len(worker.core.decode.batch.running_set.running)
    work = running if role is Role.DECODE else worker.core.prefill.queue.tokens
    return Busy(name=worker.name, role=role, work=work)
