"""Any history of a cluster, around its supervisor and its record."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from cluster.core.desired import Desired, is_stale
from cluster.core.processes import Process
from cluster.core.supervision import (
    Announce,
    DesiredChanged,
    DesiredPool,
    DrainAsked,
    Home,
    Lost,
    NodesDrain,
    Phase,
    Placed,
    ProcessJoined,
    ProcessKind,
    ProcessStopped,
    Remove,
    RoleAsked,
    RoleRefused,
    RoleTaken,
    Serving,
    SetRole,
    Start,
    State,
    StopAsked,
    StopProcess,
    SupervisionTick,
    SupervisorCommand,
    SupervisorEvent,
)
from cluster.core.supervisor import Supervisor
from cluster.on_ray import controller as shell
from cluster.on_ray.record import ClusterRecord
from engine.core.activity import Stage
from kvrelay.types import Role
from tests.unit.test_supervisor import HERE, LIMITS, THERE, act, does, pools


class Seen:
    """Before an event. # pool |-> how many don't leave; the names that serve, and that leave"""

    def __init__(self, core: Supervisor) -> None:
        there = [*core.members]
        self.staying = Counter(one.pool for one in there if not one.leaves)
        self.serving = {one.name for one in there if one.state is State.SERVING}
        self.leaving = {one.name for one in there if one.leaves}


def check_surge(core: Supervisor, before: Seen) -> None:
    """One that is started finds at most one more than its pool shall have, or one for each that is
    on a node that ends. A router waits for the ports."""
    for pool, wish in core.members.desired.items():
        there = core.members.of(pool)
        staying = [one for one in there if not one.leaves]
        if len(staying) <= before.staying[pool]:
            continue
        stale = [one for one in staying if is_stale(one, wish)]
        more = max(len(stale[:1]), sum(one.leave_by_s is not None for one in stale))
        held = there if wish.kind is ProcessKind.ROUTER else staying
        most = wish.count if wish.kind is ProcessKind.ROUTER else wish.count + more
        assert len(held) <= most, (pool, held)


def check_serving(core: Supervisor, before: Seen, event: SupervisorEvent, now_s: float) -> None:
    """Nobody who serves leaves unless as many serve as shall. One at a time may, where the newcomer
    finds no room; those may that are asked to, or whose node is about to end."""
    for pool, wish in core.members.desired.items():
        there = core.members.of(pool)
        asked = event.name if isinstance(event, DrainAsked) else ""
        drained = [one for one in there if one.state is State.DRAINING and one.name != asked]
        left = [one for one in drained if one.name in before.serving and not one.must_leave(now_s)]
        in_room = wish.kind is ProcessKind.ROUTER or any(one.waits for one in there)
        others = any(one.leaves and one.name in before.leaving for one in there)
        if not left or (in_room and len(left) == 1 and not others):
            continue
        staying = [one for one in there if one.may_serve and not one.leaves]
        assert len(staying) >= wish.count, (event, pool, left, there)
        if any(is_stale(one, wish) for one in left):
            known = [one for one in staying if counts(core, one, wish)]
            assert len(known) >= wish.count, (event, pool, left, there)


def counts(core: Supervisor, process: Process, wish: DesiredPool) -> bool:
    """A newcomer does once all others have heard of it."""
    if is_stale(process, wish):
        return process.state is State.SERVING
    routers = {router.name for router in core.members.serving_routers()}
    if process.kind is ProcessKind.WORKER:
        return process.joined >= routers
    workers = (one for one in core.workers.values() if one.state is State.SERVING)
    return all(process.name in worker.joined for worker in workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """As much of a cluster's plan as a controller asks of it."""

    pools: Desired
    pool: Nodes
    startup_timeout_s: float = LIMITS.startup_timeout_s
    hang_timeout_s: float = LIMITS.hang_timeout_s

    def desired(self) -> Desired:
        return self.pools


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Pool nodes, as a plan has them."""

    revision: str
    placement: str = "{}"
    required: bool = False


class World:
    """What runs, and the cluster's record. A killed controller takes with it all that was on its
    way; the next one has what it reads."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.alive: set[str] = set()
        self.roles: dict[str, Role | None] = {}  # that they really have
        self.revisions: dict[str, str] = {}  # with which pool nodes started
        self.now_s = 0.0
        self.events = 0
        self.is_calm = False
        plan: Any = Pools(pools=pools(routers=2), pool=Nodes(revision="1"))
        self.stored = pickle.dumps(ClusterRecord(plan=plan, driver=None))
        self.begin()

    @property
    def pool_revision(self) -> str:
        return self.core.pools.revision

    def begin(self) -> None:
        record: ClusterRecord = pickle.loads(self.stored)
        with patch.object(shell, "time", SimpleNamespace(monotonic=lambda: self.now_s)):
            self.core = shell._new_core(record, frozenset(self.alive))
        self.todo: list[SupervisorCommand] = []
        assert not record.roles or self.core.members.roles == record.roles

    def remember(self) -> None:
        core = self.core
        plan: Any = Pools(pools=core.members.desired, pool=Nodes(revision=core.pools.revision))
        roles = dict(core.members.roles)
        record = ClusterRecord(
            plan=plan, driver=None, phase=core.phase, kept=core.kept(), roles=roles
        )
        self.stored = pickle.dumps(record)

    def tell(self, event: SupervisorEvent) -> None:
        self.events += 1
        roles, before = dict(self.core.members.roles), Seen(self.core)
        commands = act(self.core, event, self.now_s)
        assert self.core.error is None
        wished = isinstance(event, DesiredChanged | DrainAsked | RoleAsked | RoleRefused)
        assert wished or self.core.members.roles == roles, "else they stay"
        check_surge(self.core, before)
        if self.core.phase is not Phase.STOPPING:
            check_serving(self.core, before, event, self.now_s)
        if not self.is_calm and self.rng.random() < 0.003:
            self.begin()  # it was killed before it had written that down
            return
        self.remember()
        for command in commands:
            self.obey(command)

    def obey(self, command: SupervisorCommand) -> None:
        match command:
            case Remove(name=name):
                self.alive.discard(name)
            case Start(name=name, role=role):
                self.roles[name] = self.roles[name] if name in self.alive else role
                if name not in self.alive:
                    self.revisions[name] = self.pool_revision
                self.alive.add(name)
                self.todo.append(command)
            case _:
                self.todo.append(command)

    def step(self) -> None:
        self.now_s += self.rng.random()
        chance = self.rng.random()
        surprises = (act_so for limit, act_so in self._surprises() if chance < limit)
        next(surprises, self.go_on)()

    def _surprises(self) -> list[tuple[float, Callable[[], None]]]:
        return [
            (0.01, self.begin),
            (0.03, self.wish),
            (0.05, self.drain),
            (
                0.055,
                lambda: self.tell(NodesDrain({self.home().node: 30.0})),
            ),
            (0.09, self.kill),
            (0.12, self.flip),
            (0.18, self.place),
        ]

    def go_on(self) -> None:
        if self.todo and self.rng.random() < 0.8:
            self.carry_out(self.todo.pop(self.rng.randrange(len(self.todo))))
        else:
            self.tell(SupervisionTick())

    def wish(self) -> None:
        counts = {name: self.rng.randint(1, 3) for name in ("routers", "prefill", "decode")}
        desired = dict(pools(**counts, revision=str(self.rng.randint(1, 3))))
        if self.rng.random() < 0.3:
            role = self.rng.choice([None, *Role])
            revision = str(self.rng.randint(1, 3))
            desired["more"] = replace(desired["decode"], revision=revision, role=role)
        anew, nodes = self.rng.random() < 0.2, self.rng.choice(["1", "2"])
        self.tell(DesiredChanged(desired, anew=anew, pool_revision=nodes))

    def flip(self) -> None:
        name = self.rng.choice([*self.core.workers])
        self.tell(RoleAsked(name, self.rng.choice([*Role])))

    def drain(self) -> None:
        name = self.rng.choice([one.name for one in self.core.members])
        wish = self.core.members.desired.get(self.core.members.find(name).pool)  # type: ignore[union-attr]
        spare = wish is not None and wish.count > 1
        self.tell(DrainAsked(name=name, replace=not spare or self.rng.random() < 0.5))

    def kill(self) -> None:
        if not self.alive:
            return
        name = self.rng.choice(sorted(self.alive))
        process = self.core._named(name)
        if process is not None and not process.life:
            return  # a new controller asks those that are left at once
        self.alive.discard(name)
        if process is not None:
            self.tell(Lost(name=name, life=process.life, reason="killed"))

    def place(self) -> None:
        name = self.rng.choice([*self.core.workers])
        self.tell(Placed(name=name, life=self.core.workers[name].life, home=self.home()))

    def home(self) -> Home:
        return self.rng.choice([HERE, THERE])

    def carry_out(self, command: SupervisorCommand) -> None:
        lucky = self.rng.random() < 0.9
        match command:
            case Start(name=name, life=life, node=node) if name in self.alive and lucky:
                if node is None and name in self.core.workers:
                    self.tell(Placed(name=name, life=life, home=self.home()))
                self.tell(Serving(name=name, life=life, address=f"{name}'s"))
            case Start(name=name, life=life) if lucky:
                self.tell(Lost(name=name, life=life, reason="no luck"))
            case Start(name=name, life=life):
                self.tell(does(name, Stage.WAITS, life=life))
                self.todo.append(command)
            case SetRole(name=name, life=life, role=role) if not self.is_wished(command):
                return
            case SetRole(name=name, life=life, role=role) if lucky or self.is_unknown(name):
                self.roles[name] = role
                if self.rng.random() < 0.1:
                    self.begin()
                else:
                    self.tell(RoleTaken(name, life, role))
            case SetRole(name=name, life=life, role=role):
                self.tell(RoleRefused(name, life, role, "no luck"))
            case Announce(router=router, name=name, life=life) if router in self.alive:
                self.tell(ProcessJoined(name=name, life=life, router=router))
            case StopProcess(name=name):
                self.alive.discard(name)
                self.tell(ProcessStopped(name=name))

    def is_wished(self, command: SetRole) -> bool:
        worker = self.core.current(command.name, command.life)
        if worker is None or command.name not in self.alive:
            return False
        return worker.role is command.role

    def is_unknown(self, name: str) -> bool:
        """A role that it may have already is not refused."""
        return self.core.workers[name].has_role is None

    def stop(self) -> None:
        self.is_calm = True
        self.tell(StopAsked())
        while self.todo:
            self.carry_out(self.todo.pop(0))

    def calm_down(self) -> int:
        """Ticks until all is as desired, when nothing is lost any more."""
        self.is_calm = True
        for tick in range(200):
            while self.todo:
                self.carry_out(self.todo.pop(0))
            if self.core.is_settled():
                self.check_roles()
                self.is_calm = False
                return tick
            self.now_s += 0.5
            self.tell(SupervisionTick())
        raise AssertionError([str(one) for one in self.core.processes()])

    def check_roles(self) -> None:
        for pool, wanted in self.core.members.roles.items():
            there = self.core.members.of(pool)
            assert Counter(self.roles[one.name] for one in there) == wanted, pool
        for worker in self.core.workers.values():
            assert self.roles[worker.name] is worker.role, worker
        for node in self.core.pools.processes():
            if node.state is State.SERVING:
                assert self.revisions[node.name] == self.pool_revision, node
