"""Decides which processes of a cluster to start, announce, restart, replace and stop. Pure.

Its pools have a desired state, to which it brings those that run: see `cluster.core.desired`.
`handle(event, now_s)` is the only door. The shell (the controller actor) turns commands into
processes, and what happens to them into events. Each start of a process has a number, its `life`;
events of an older life are dropped.

A supervisor whose controller was restarted goes on in the phase in which the cluster was. Only a
cluster that was never READY is stopped because it can't start.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import assert_never

from cluster.core.desired import Desired
from cluster.core.members import NEW, Former, Kept, Members
from cluster.core.processes import STARTS, PoolHomes, Process, doing
from cluster.core.supervision import (
    Announce,
    DesiredChanged,
    Does,
    DrainAsked,
    DriverEnded,
    Lost,
    NodesDrain,
    Note,
    Phase,
    Placed,
    ProcessAnswered,
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
from cluster.core.watches import HangWatch, StartWatch
from kvrelay.types import Role

STARTS_BEFORE_FATAL = 3
"""A process that never served is given up after this many starts."""
REMIND_S = 10.0
LEAVES_WITHIN_S = 6.0
"""Before its node ends: what it runs moves, and it stops. A lame duck begins earlier."""
RUNS = (State.STARTING, State.SERVING)
WITH_ADDRESS = (State.SERVING, State.DRAINING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    startup_timeout_s: float
    """For the first start of all, and for each later start of one process."""
    hang_timeout_s: float
    """A process that doesn't answer for this long is killed and started again."""


class Supervisor:
    """One cluster: its routers and workers, and a pool node on each host with workers if it has a
    pool."""

    def __init__(
        self,
        desired: Desired,
        limits: Limits,
        now_s: float,
        *,
        pool_needs: str | None = None,
        pool_required: bool = True,
        pool_revision: str = "",
        former: Former = NEW,
    ) -> None:
        """`pool_needs`: the resources that a pool node asks of Ray, or None without a pool. Without
        `pool_required`, pool nodes start once the cluster is READY and the workers of their host
        have taken their memory; one that can't start is left out."""
        self.members = Members(desired, former)
        self.pools = PoolHomes(pool_revision)
        self._pool_needs = pool_needs
        self._pool_required = pool_required
        self._remind_at_s = now_s + REMIND_S
        self._starting = StartWatch(limits.startup_timeout_s, now_s)
        self._hanging = HangWatch(limits.hang_timeout_s, now_s)
        self.phase, self.error = former.phase, former.error
        self._left = {*former.left}
        for name, kept in former.pool_nodes():
            self.pools.adopt(name, kept.home, kept.revision, kept.known_at)
        self._redrained = [one for one in self.members if one.state is State.DRAINING]
        self.members.reconcile()
        if self.phase is Phase.STOPPING:
            self._adopt_pools()

    @property
    def routers(self) -> Mapping[str, Process]:
        return self.members.routers

    @property
    def workers(self) -> Mapping[str, Process]:
        return self.members.workers

    def processes(self) -> tuple[Process, ...]:
        return (*self.routers.values(), *self._announced())

    def kept(self) -> dict[str, Kept]:
        """What the next controller must know, if this one ends."""
        pools = {pool.name: Kept.of(pool) for pool in self.pools.processes()}
        return {**self.members.kept(), **pools}

    def is_settled(self) -> bool:
        """Every process is there as desired, and serves."""
        settled = self.members.is_settled() and self.pools.is_settled()
        return self.phase is Phase.READY and settled

    def current(self, name: str, life: int) -> Process | None:
        """The process, if this is its life."""
        process = self._named(name)
        return process if process is not None and process.life == life else None

    def handle(self, event: SupervisorEvent, now_s: float) -> list[SupervisorCommand]:
        match event:
            case SupervisionTick():
                return self._tick(now_s)
            case Placed():
                return self._placed(event, now_s)
            case Does():
                return self._does(event)
            case Serving():
                return self._serving(event, now_s)
            case Lost():
                return self._lost(event, now_s)
            case ProcessJoined():
                return self._joined(event)
            case ProcessAnswered(name=name, life=life):
                if (process := self.current(name, life)) is not None:
                    process.hears(now_s)
                return []
            case ProcessStopped(name=name):
                return self._stopped(name, now_s)
            case DesiredChanged(desired=desired, anew=anew, pool_revision=revision):
                self.members.want(desired, anew=anew)
                self.pools.revision = self.pools.revision if revision is None else revision
                return self._reconcile()
            case RoleAsked(name=name, role=role):
                return self._role_asked(name, role)
            case RoleTaken() | RoleRefused():
                return self._role_answered(event)
            case DrainAsked():
                return self._drain_asked(event)
            case NodesDrain(nodes=nodes):
                return self._nodes_drain(nodes, now_s)
            case DriverEnded():
                return self._stop("the serve command has ended")
            case StopAsked():
                return self._stop("asked to stop")
            case _:
                assert_never(event)

    def validate(self) -> None:
        """A process that serves has an address. It is known only to routers that serve. No pool has
        more processes of its settings than it shall have. A stopped cluster has no process left."""
        serving = {router.name for router in self.members.serving_routers()}
        states = {process.state for process in self.processes()}
        assert self.phase is not Phase.STOPPED or states <= {State.GONE}, states
        for process in self.processes():
            assert process.state is not State.SERVING or process.address is not None, process
            assert process.address is None or process.state in WITH_ADDRESS, process
            told = process.joined or process.refused
            assert process.state is State.SERVING or not told, process
            assert process.joined <= serving, process
        self.members.validate()

    # Starting and restarting

    def _tick(self, now_s: float) -> list[SupervisorCommand]:
        if self.phase is Phase.STOPPING:
            return [*self._drain_again(), *self._stop_routers()]
        if self.phase is Phase.STOPPED:
            return []
        watched = [*self._watch(now_s), *self._settle_pools(now_s)]
        watched += [*self._drain_again(), *self._leave_in_time(now_s), *self._reconcile()]
        if self._may_give_up() and self._starting.is_over():
            return self._fail(f"{self._missing()} did not start in time; is there room for it?")
        due = [p for p in self.processes() if p.is_due(now_s)]
        started = [command for p in due for command in self._start(p)]
        return [*started, *watched, *self._reminder(now_s)]

    def _reminder(self, now_s: float) -> list[SupervisorCommand]:
        """From time to time, what a start still waits for."""
        if self.phase is not Phase.STARTING or now_s < self._remind_at_s:
            return []
        self._remind_at_s = now_s + REMIND_S
        waiting = [(p.name, doing) for p in self.processes() if (doing := self.doing(p))]
        told = ", ".join(f"{name}: {doing}" for name, doing in waiting)
        return [Note(f"still waiting for {told}")] if waiting else []

    def doing(self, process: Process) -> str:
        """Its current activity in words; empty once it serves and every router knows it."""
        return doing(process, self.routers.keys())

    def _does(self, event: Does) -> list[SupervisorCommand]:
        process = self.current(event.name, event.life)
        if process is None or process.state is not State.STARTING:
            return []
        before, process.activity = process.activity.stage, event.activity
        if event.activity.stage is before:
            return []
        return [Note(f"{process.name} {self.doing(process)}")]

    def _may_give_up(self) -> bool:
        """Only a cluster that was never READY is stopped because it can't start."""
        return self.phase is Phase.STARTING

    def _missing(self) -> str:
        return ", ".join(p.name for p in self.processes() if p.state is not State.SERVING)

    def _start(self, process: Process) -> list[SupervisorCommand]:
        self.members.starts(process)
        if process.kind is ProcessKind.POOL_NODE:
            self.pools.starts(process)
        process.state, process.activity, process.starting_s = State.STARTING, STARTS, 0.0
        home = process.home if process.kind is ProcessKind.POOL_NODE else None
        start = Start(process.name, process.life, home.node if home else None, process.role)
        return [Note(f"starting {process.name} ..."), start]

    def _watch(self, now_s: float) -> list[SupervisorCommand]:
        """Processes that don't answer are lost, and those that hang while they start."""
        serving = [p for p in self.processes() if p.state is State.SERVING]
        asked, silent = self._hanging.look(serving, now_s)
        stuck = self._starting.look(self.processes(), now_s)
        reason = f"it has not answered for {self._hanging.timeout_s:g} s"
        lost = [Lost(name=p.name, life=p.life, reason=reason) for p in silent]
        if not self._may_give_up():  # else the limit of the whole start applies
            reason = f"it did not start within {self._starting.timeout_s:g} s"
            lost += [Lost(name=p.name, life=p.life, reason=reason) for p in stuck]
        return [*asked, *(command for one in lost for command in self._lost(one, now_s))]

    def _placed(self, event: Placed, now_s: float) -> list[SupervisorCommand]:
        process = self.current(event.name, event.life)
        if process is None or process.state not in (State.STARTING, State.SERVING):
            return []
        process.home = event.home
        return self._settle_pools(now_s)

    def _settle_pools(self, now_s: float) -> list[SupervisorCommand]:
        if self._pool_needs is None or self._is_over:
            return []
        unwanted = self.pools.settle(self.workers.values(), self._states_for_pools(), now_s)
        gone = [c for pool in unwanted for c in self._retire(pool, "no worker is there any more")]
        why = "its settings have changed"
        return gone + [c for pool in self.pools.replaceable() for c in self._retire(pool, why)]

    def _states_for_pools(self) -> Collection[State]:
        """The states of workers beside which a pool node starts."""
        if self._pool_required:
            return tuple(State)
        return (State.SERVING,) if self.phase is Phase.READY else ()

    def _retire(self, pool: Process, why: str) -> list[SupervisorCommand]:
        note = Note(f"{pool.name} is stopped: {why}")
        return [note, *self.members.withdrawal(pool), self._stop_process(pool)]

    def _serving(self, event: Serving, now_s: float) -> list[SupervisorCommand]:
        process = self.current(event.name, event.life)
        if process is None or process.state is not State.STARTING:
            return []
        moved = [] if process.known_at == event.address else self.members.withdrawal(process)
        process.state, process.address = State.SERVING, event.address
        process.known_at, process.served_s, process.hopeless = event.address, now_s, ""
        process.hears(now_s)
        note = Note(f"{process.name} serves on {event.address}")
        told = [*self._announcements(process), *self._set_role(process)]
        return [note, *moved, *self.members.farewells(process, self._announced()), *told]

    def _announcements(self, newcomer: Process) -> list[SupervisorCommand]:
        """Announces all serving processes to a new router, and a new process to every serving
        router."""
        is_router = newcomer.kind is ProcessKind.ROUTER
        routers = [newcomer] if is_router else self.members.serving_routers()
        known = self._announced() if is_router else (newcomer,)
        return [
            Announce(router.name, p.name, p.life, p.address, p.kind)
            for router in routers
            for p in known
            if p.address is not None
        ]

    def _announced(self) -> tuple[Process, ...]:
        return (*self.workers.values(), *self.pools.processes())

    def _joined(self, event: ProcessJoined) -> list[SupervisorCommand]:
        joined, router = self.current(event.name, event.life), self.routers.get(event.router)
        if joined is None or router is None or {joined.state, router.state} != {State.SERVING}:
            return []
        if event.refused is not None:
            joined.refused[event.router] = event.refused
            text = "; ".join(joined.refusals)
            return self._fail(text) if self._may_give_up() else [Note(text)]
        joined.joined.add(event.router)
        joined.refused.pop(event.router, None)
        if self.phase is Phase.STARTING and self._can_serve():
            self.phase = Phase.READY
        return []

    def _can_serve(self) -> bool:
        """A router knows a worker for each half of a request, and all pool nodes that must be
        there."""
        needed = self.pools.processes() if self._pool_required else ()
        known = (router for router in self.routers if all(router in one.joined for one in needed))
        return any(self.members.can_serve(router) for router in known)

    def _lost(self, event: Lost, now_s: float) -> list[SupervisorCommand]:
        process = self.current(event.name, event.life)
        if process is None or process.state not in (State.STARTING, State.SERVING):
            return []
        is_vain = self._is_vain(process, event)
        if is_vain and process.served_s is None and self._may_give_up():
            return self._fail(f"{process.name}: {event.reason}")
        if event.fatal and process.kind is ProcessKind.POOL_NODE and not self._pool_required:
            return self._leave_out(process, event.reason)
        wait_s = process.back_off(now_s)
        process.hopeless = event.reason if is_vain else ""
        self._forget_router(process.name)
        self._left.discard(process.name)
        note = Note(f"{process.name} is lost: {event.reason}; starting it again in {wait_s:g} s")
        cleaned = [*self.members.withdrawal(process), Remove(process.name)]
        return [note, *cleaned, *self._reconcile()]

    def _leave_out(self, pool: Process, reason: str) -> list[SupervisorCommand]:
        """Another start would fail in the same way, and the cluster can do without it."""
        pool.state, pool.left_out = State.LEFT_OUT, reason
        pool.address, pool.joined = None, set()
        self._left.discard(pool.name)
        return [Note(f"{pool.name} is left out: {reason}"), Remove(pool.name)]

    def _forget_router(self, name: str) -> None:
        for process in self._announced():
            process.joined.discard(name)
            process.refused.pop(name, None)

    def _is_vain(self, process: Process, event: Lost) -> bool:
        """To start it again. A process that never served then holds up a cluster that starts."""
        never = process.served_s is None
        return event.fatal or (never and process.failures + 1 >= STARTS_BEFORE_FATAL)

    # The desired state

    @property
    def _is_over(self) -> bool:
        return self.phase in (Phase.STOPPING, Phase.STOPPED)

    def _reconcile(self) -> list[SupervisorCommand]:
        if self._is_over:
            return []
        leaving, changed = self.members.reconcile()
        gone = [command for one in leaving for command in self._let_go(one)]
        return gone + [command for one in changed for command in self._set_role(one)]

    def _role_asked(self, name: str, role: Role) -> list[SupervisorCommand]:
        process = self.members.workers.get(name)
        if process is None or process.leaves or process.role is role:
            return []
        if self.phase is not Phase.READY:  # else it might never be
            return []
        self.members.take_role(process, role)
        return [*self._set_role(process), *self._reconcile()]

    def _set_role(self, process: Process) -> list[SupervisorCommand]:
        """One that does not serve yet starts with it, or is told when it serves."""
        wanted, serves = process.role, process.state is State.SERVING
        if wanted is None or wanted is process.has_role or not serves:
            return []
        return [SetRole(process.name, process.life, wanted)]

    def _role_answered(self, event: RoleTaken | RoleRefused) -> list[SupervisorCommand]:
        process = self.current(event.name, event.life)
        if process is None:
            return []
        if isinstance(event, RoleTaken):
            process.has_role = event.role
            return [Note(f"{event.name} has the role {event.role}"), *self._set_role(process)]
        if process.role is not event.role:
            return []
        self.members.keep_role(process)
        told = f"{event.name} keeps the role {process.role}: {event.reason}"
        return [Note(told), *self._reconcile()]

    def _drain_asked(self, event: DrainAsked) -> list[SupervisorCommand]:
        process = self.members.find(event.name)
        if process is None or process.leaves or self._is_over:
            return []
        if not event.replace and process.pool in self.members.desired:
            self.members.lower(process)
        return [*self._let_go(process), *self._reconcile()]

    def _nodes_drain(self, nodes: Mapping[str, float], now_s: float) -> list[SupervisorCommand]:
        """Those on them leave when others serve in their place, or when it becomes too late."""
        for one in self.members:
            if one.home is not None and one.home.node in nodes and one.state in RUNS:
                within_s = LEAVES_WITHIN_S + self.members.lame_duck_s(one)
                by_s = now_s + nodes[one.home.node] - within_s
                one.leave_by_s = by_s if one.leave_by_s is None else min(by_s, one.leave_by_s)
        return self._reconcile()

    def _leave_in_time(self, now_s: float) -> list[SupervisorCommand]:
        late = [one for one in self.members if not one.leaves and one.must_leave(now_s)]
        return [command for one in late for command in self._let_go(one)]

    def _let_go(self, process: Process) -> list[SupervisorCommand]:
        return [Note(f"{process.name} leaves"), self._stop_process(process)]

    def _drain_again(self) -> list[SupervisorCommand]:
        """A former controller had begun to, and won't hear that they are gone."""
        again, self._redrained = self._redrained, []
        return [self._told_to_stop(one) for one in again]

    # Stopping

    def _fail(self, error: str) -> list[SupervisorCommand]:
        self.error = error
        return self._stop(error)

    def _stop(self, why: str) -> list[SupervisorCommand]:
        """Routers stop first, and none is a lame duck: they finish running requests, which needs
        the workers. Then these stop, which still store KV in pool nodes. Pool nodes stop last."""
        if self._is_over:
            return []
        self.phase = Phase.STOPPING
        self._adopt_pools()
        leading = [one for one in self.routers.values() if one.state is State.DRAINING]
        return [Note(f"stopping: {why}"), *map(self._told_to_stop, leading), *self._stop_routers()]

    def _adopt_pools(self) -> None:
        """Pool nodes that no worker has led to yet are drained too."""
        for name in sorted(self._left):
            if self._named(name) is None:
                self.pools.adopt(name)

    def _stop_routers(self) -> list[SupervisorCommand]:
        """Those that were not asked yet; with a restarted controller, these are all."""
        asked = [self._stop_process(r) for r in self.routers.values() if not r.leaves]
        return asked or self._router_stopped()

    def _stopped(self, name: str, now_s: float) -> list[SupervisorCommand]:
        process = self._named(name)
        assert process is not None, name
        process.address, process.state = None, State.GONE
        if self.phase is not Phase.STOPPING:
            return self._gone(process, now_s)
        if process.kind is ProcessKind.ROUTER:
            return self._router_stopped()
        left = [p for p in self.processes() if p.state is not State.GONE]
        if not left:
            self.phase = Phase.STOPPED
        elif all(p.kind is ProcessKind.POOL_NODE for p in left):
            return [self._stop_process(p) for p in left if not p.leaves]
        return []

    def _gone(self, process: Process, now_s: float) -> list[SupervisorCommand]:
        self._left.discard(process.name)
        if process.kind is not ProcessKind.POOL_NODE:
            self.members.remove(process)
        settled = [*self._settle_pools(now_s), *self._reconcile()]
        return [*self.members.withdrawal(process), *settled]

    def _router_stopped(self) -> list[SupervisorCommand]:
        """After the last router, the workers stop."""
        if any(router.state is not State.GONE for router in self.routers.values()):
            return []
        return [self._stop_process(one) for one in self.workers.values() if not one.leaves]

    def _stop_process(self, process: Process) -> SupervisorCommand:
        """Routers that know a worker which drains hear from itself that it does. They hear that it
        is gone when it is."""
        drain = process.may_serve or process.name in self._left
        process.state = State.DRAINING if drain else State.STOPPING
        process.joined, process.refused = set(), {}
        if process.kind is not ProcessKind.WORKER or not drain:
            process.address = None
        self._forget_router(process.name)
        return self._told_to_stop(process)

    def _told_to_stop(self, process: Process) -> SupervisorCommand:
        drain = process.state is State.DRAINING
        leads = process.kind is ProcessKind.ROUTER and self.phase is not Phase.STOPPING
        return StopProcess(process.name, drain, lame_duck=drain and leads)

    def _named(self, name: str) -> Process | None:
        return self.members.find(name) or self.pools.find(name)
