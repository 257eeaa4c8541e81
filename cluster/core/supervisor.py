"""Decides which processes of a cluster to start, announce, restart and stop. Pure.

`handle(event, now_s)` is the only door. The shell (the controller actor) turns commands into
processes, and what happens to them into events. Each start of a process has a number, its `life`;
events of an older life are dropped.

The parts: a process with its restart rules, the heartbeats of processes and of the driver, the
hosts that need a pool node, and the supervisor itself. While the supervisor itself pauses, nobody
counts as silent: their messages are still to be read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from cluster.core.supervision import (
    Announce,
    Does,
    DriverSeen,
    Home,
    Lost,
    Note,
    Phase,
    PingProcess,
    Placed,
    ProcessAnswered,
    ProcessJoined,
    ProcessKind,
    ProcessStopped,
    Recalled,
    Remember,
    Remove,
    Serving,
    Start,
    State,
    StopAsked,
    StopProcess,
    SupervisionTick,
    SupervisorCommand,
    SupervisorEvent,
    Withdraw,
)
from engine.core.activity import Stage, StartActivity
from engine.core.own_time import OwnTime

FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 60.0
STABLE_S = 60.0
"""A process that served for this long starts its back-off anew."""
STARTS_BEFORE_FATAL = 3
"""A process that never served is given up after this many starts."""


STARTS = StartActivity(stage=Stage.STARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    startup_timeout_s: float
    """For the first start of all, and for each later start of one process."""
    driver_timeout_s: float | None
    """None: the cluster outlives its driver."""
    hang_timeout_s: float
    """A process that doesn't answer for this long is killed and started again."""


@dataclass(slots=True, kw_only=True)
class Process:
    """`home` is where it runs or last ran; for a pool node, where it shall run. `joined`: the
    routers that know it."""

    name: str
    kind: ProcessKind
    state: State = State.GONE
    life: int = 0
    failures: int = 0
    served_s: float | None = None
    joined: set[str] = field(default_factory=set)
    address: str | None = None
    start_at_s: float = 0.0
    home: Home | None = None
    activity: StartActivity = STARTS  # while its state is STARTING
    left_out: str = ""  # why, while its state is LEFT_OUT
    starting_s: float = 0.0  # for how long, without its wait for a place
    asked_s: float | None = None  # for a sign of life, not answered yet
    heard_s: float = 0.0  # when there was the last one

    def is_due(self, now_s: float) -> bool:
        return self.state is State.BACKING_OFF and self.start_at_s <= now_s

    @property
    def is_busy_starting(self) -> bool:
        return self.state is State.STARTING and self.activity.stage is not Stage.WAITS

    def hears(self, now_s: float) -> None:
        self.asked_s, self.heard_s = None, now_s

    def back_off(self, now_s: float) -> float:
        """It failed again. Returns the seconds until its next start."""
        self.failures = 1 if self._was_stable(now_s) else self.failures + 1
        wait_s = min(FIRST_BACKOFF_S * 2 ** (self.failures - 1), LAST_BACKOFF_S)
        self.state, self.start_at_s = State.BACKING_OFF, now_s + wait_s
        self.address, self.joined = None, set()
        return wait_s

    def _was_stable(self, now_s: float) -> bool:
        if self.state is not State.SERVING or self.served_s is None:
            return False
        return now_s - self.served_s >= STABLE_S


PINGS = 4
"""Pings to a silent process before it is given up."""
COUNTED_S = 1.0
"""Between two looks at most this much counts as a silence or as part of a start. The supervisor
looks twice a second, unless it stands still itself."""


@dataclass(slots=True, kw_only=True)
class Watching:
    """May be called at any interval. A standstill of the supervisor itself is blamed on nobody."""

    timeout_s: float
    looked_s: float

    def look(
        self, serving: Sequence[Process], now_s: float
    ) -> tuple[list[PingProcess], list[Process]]:
        """(processes to ping, processes that have been silent for too long)"""
        stood_still = now_s - self.looked_s > self.timeout_s / PINGS
        self.looked_s = now_s
        for process in serving if stood_still else ():
            process.asked_s = None if process.asked_s is None else now_s
        due = [p for p in serving if self._is_due(p, now_s)]
        silent = [p for p in serving if self._is_silent(p, now_s)]
        for process in due:
            process.asked_s = now_s
        return [PingProcess(process.name, process.life) for process in due], silent

    def _is_due(self, process: Process, now_s: float) -> bool:
        return process.asked_s is None and now_s - process.heard_s >= self.timeout_s / PINGS

    def _is_silent(self, process: Process, now_s: float) -> bool:
        return process.asked_s is not None and now_s - process.asked_s >= self.timeout_s


class StartWatch:
    """A process that hangs while it starts answers no ping yet."""

    def __init__(self, timeout_s: float, now_s: float) -> None:
        self.timeout_s = timeout_s
        self._own_time = OwnTime(most_s=COUNTED_S, looked_s=now_s)

    def look(self, processes: Iterable[Process], now_s: float) -> list[Process]:
        """Those that have been starting for too long. A wait for resources has no limit."""
        passed_s = self._own_time.since_last(now_s)
        starting = [p for p in processes if p.is_busy_starting]
        for process in starting:
            process.starting_s += passed_s
        return [p for p in starting if p.starting_s > self.timeout_s]


class DriverWatch:
    """`timeout_s` is None when the cluster outlives its driver."""

    def __init__(self, timeout_s: float | None, now_s: float) -> None:
        self.timeout_s = timeout_s
        self._own_time = OwnTime(most_s=COUNTED_S, looked_s=now_s)
        self._silent_s = 0.0

    def hears(self, now_s: float) -> None:
        self._own_time.since_last(now_s)
        self._silent_s = 0.0

    def is_gone(self, now_s: float) -> bool:
        self._silent_s += self._own_time.since_last(now_s)
        return self.timeout_s is not None and self._silent_s > self.timeout_s


def pool_process(host: str) -> str:
    """The same name at every start, so that a restarted controller finds it."""
    return f"pool-{host}"


class PoolHomes:
    """Removed pool nodes stay known, so that events of their old lives are recognised."""

    def __init__(self) -> None:
        self._known: dict[str, Process] = {}

    def processes(self) -> tuple[Process, ...]:
        return tuple(p for p in self._known.values() if p.state is not State.GONE)

    def find(self, name: str) -> Process | None:
        return self._known.get(name)

    def settle(
        self, workers: Iterable[Process], states: Collection[State], now_s: float
    ) -> list[Process]:
        """Adds pool nodes where workers are in one of these states. Returns those that are no
        longer wanted, since no worker is there."""
        placed = {(worker.home, worker.state) for worker in workers if worker.home is not None}
        homes = {home for home, _ in placed}
        wanted = {home for home, state in placed if state in states}
        for home in sorted(wanted, key=lambda home: home.node):
            self._want(home, homes, now_s)
        hosts = {home.host for home in homes}
        return [p for p in self.processes() if p.home and p.home.host not in hosts and _runs(p)]

    def _want(self, home: Home, homes: set[Home], now_s: float) -> None:
        name = pool_process(home.host)
        pool = self._known.setdefault(name, Process(name=name, kind=ProcessKind.POOL_NODE))
        if pool.home not in homes:
            pool.home = home
        if pool.state is State.GONE:
            pool.state, pool.start_at_s = State.BACKING_OFF, now_s


def _runs(pool: Process) -> bool:
    return pool.state is not State.STOPPING


REMIND_S = 10.0


class Supervisor:
    """One cluster: its routers and workers, and a pool node on each host with workers if it has a
    pool."""

    def __init__(
        self,
        routers: Iterable[str],
        needs: Mapping[str, str],
        limits: Limits,
        now_s: float,
        *,
        pool_needs: str | None = None,
        pool_required: bool = True,
        restarted: bool = False,
    ) -> None:
        """`needs`: # router or worker |-> the resources it asks of Ray, in words; `pool_needs`:
        those of a pool node, or None without a pool. Without `pool_required`, pool nodes start
        once the cluster is READY and the workers of their host have taken their memory; one that
        can't start is left out. `restarted`: processes of an earlier controller may run; no rule of
        the start applies before `Recalled` reports on them."""
        self.routers = {name: Process(name=name, kind=ProcessKind.ROUTER) for name in routers}
        self.workers = {
            name: Process(name=name, kind=ProcessKind.WORKER)
            for name in needs
            if name not in self.routers
        }
        self.pools = PoolHomes()
        self._needs = needs
        self._pool_needs = pool_needs
        self._pool_required = pool_required
        self._remind_at_s = now_s + REMIND_S
        self.phase = Phase.STARTING
        self.error: str | None = None
        self._limits = limits
        self._started_s = now_s
        self._recalling = restarted
        self._driver = DriverWatch(limits.driver_timeout_s, now_s)
        self._starting = StartWatch(limits.startup_timeout_s, now_s)
        self._watching = Watching(timeout_s=limits.hang_timeout_s, looked_s=now_s)
        for process in self.processes():
            process.state = State.BACKING_OFF

    def processes(self) -> tuple[Process, ...]:
        return (*self.routers.values(), *self._announced())

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
                if (process := self._current(name, life)) is not None:
                    process.hears(now_s)
                return []
            case ProcessStopped(name=name):
                return self._stopped(name, now_s)
            case Recalled():
                return self._recalled(event)
            case DriverSeen():
                self._driver.hears(now_s)
                return self._tick(now_s)
            case StopAsked():
                return self._stop("asked to stop")
            case _:
                assert_never(event)

    def validate(self) -> None:
        """A process serves exactly when it has an address. It is known only to routers that serve.
        A stopped cluster has no process left."""
        serving = {router.name for router in self._serving_routers()}
        states = {process.state for process in self.processes()}
        assert self.phase is not Phase.STOPPED or states == {State.GONE}, states
        assert self.phase is not Phase.STARTING or State.GONE not in states, states
        for process in self.processes():
            assert (process.state is State.SERVING) == (process.address is not None), process
            assert process.state is State.SERVING or not process.joined, process
            assert process.joined <= serving, process

    # Starting and restarting

    def _tick(self, now_s: float) -> list[SupervisorCommand]:
        if self.phase in (Phase.STOPPING, Phase.STOPPED):
            return []
        if self._driver.is_gone(now_s):
            return self._stop("the serve command is gone")
        late = now_s - self._started_s > self._limits.startup_timeout_s
        if late and self._may_give_up():
            return self._fail(f"{self._missing()} did not start in time; is there room for it?")
        watched = [*self._watch(now_s), *self._settle_pools(now_s)]
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
        match process.state:
            case State.STARTING if process.activity.stage is Stage.WAITS:
                needs = self._needs.get(process.name, self._pool_needs)
                return f"{process.activity}, needs {needs}"
            case State.STARTING:
                return str(process.activity)
            case State.LEFT_OUT:
                return process.left_out
            case State.SERVING:
                knows_all = (
                    process.kind is ProcessKind.ROUTER or process.joined == self.routers.keys()
                )
                return "" if knows_all else "joins"
            case state:
                return state.value

    def _does(self, event: Does) -> list[SupervisorCommand]:
        process = self._current(event.name, event.life)
        if process is None or process.state is not State.STARTING:
            return []
        before, process.activity = process.activity.stage, event.activity
        if event.activity.stage is before:
            return []
        return [Note(f"{process.name} {self.doing(process)}")]

    def _may_give_up(self) -> bool:
        """Only a cluster that was never READY is stopped because it can't start."""
        return self.phase is Phase.STARTING and not self._recalling

    def _recalled(self, event: Recalled) -> list[SupervisorCommand]:
        self._recalling = False
        if self.phase is not Phase.STARTING or not event.was_ready:
            return []
        return [Note("the controller was restarted; the cluster was ready"), *self._be_ready()]

    def _be_ready(self) -> list[SupervisorCommand]:
        self.phase = Phase.READY
        return [Remember(p.name) for p in self.processes() if p.state is State.SERVING]

    def _missing(self) -> str:
        return ", ".join(p.name for p in self.processes() if p.state is not State.SERVING)

    def _start(self, process: Process) -> list[SupervisorCommand]:
        process.life += 1
        process.state, process.activity, process.starting_s = State.STARTING, STARTS, 0.0
        home = process.home if process.kind is ProcessKind.POOL_NODE else None
        start = Start(process.name, process.life, home.node if home else None)
        return [Note(f"starting {process.name} ..."), start]

    def _watch(self, now_s: float) -> list[SupervisorCommand]:
        """Processes that don't answer are lost, and those that hang while they start."""
        serving = [p for p in self.processes() if p.state is State.SERVING]
        asked, silent = self._watching.look(serving, now_s)
        stuck = self._starting.look(self.processes(), now_s)
        reason = f"it has not answered for {self._watching.timeout_s:g} s"
        lost = [Lost(name=p.name, life=p.life, reason=reason) for p in silent]
        if not self._may_give_up():  # else the limit of the whole start applies
            reason = f"it did not start within {self._starting.timeout_s:g} s"
            lost += [Lost(name=p.name, life=p.life, reason=reason) for p in stuck]
        return [*asked, *(command for one in lost for command in self._lost(one, now_s))]

    def _placed(self, event: Placed, now_s: float) -> list[SupervisorCommand]:
        worker = self._current(event.name, event.life)
        if worker is None or worker.state not in (State.STARTING, State.SERVING):
            return []
        worker.home = event.home
        return self._settle_pools(now_s)

    def _settle_pools(self, now_s: float) -> list[SupervisorCommand]:
        if self._pool_needs is None or self.phase in (Phase.STOPPING, Phase.STOPPED):
            return []
        unwanted = self.pools.settle(self.workers.values(), self._states_for_pools(), now_s)
        return [command for pool in unwanted for command in self._retire(pool)]

    def _states_for_pools(self) -> Collection[State]:
        """The states of workers beside which a pool node starts."""
        if self._pool_required:
            return tuple(State)
        return (State.SERVING,) if self.phase is Phase.READY else ()

    def _retire(self, pool: Process) -> list[SupervisorCommand]:
        note = Note(f"{pool.name} is stopped: no worker is there any more")
        return [note, *self._withdrawal(pool, pool.address), self._stop_process(pool)]

    def _serving(self, event: Serving, now_s: float) -> list[SupervisorCommand]:
        process = self._current(event.name, event.life)
        if process is None or process.state is not State.STARTING:
            return []
        process.state, process.address = State.SERVING, event.address
        process.served_s = now_s
        process.hears(now_s)
        note = Note(f"{process.name} serves on {event.address}")
        remember = [Remember(process.name)] if self.phase is Phase.READY else []
        return [note, *remember, *self._announcements(process)]

    def _announcements(self, newcomer: Process) -> list[SupervisorCommand]:
        """Announces all serving processes to a new router, and a new process to every serving
        router."""
        is_router = newcomer.kind is ProcessKind.ROUTER
        routers = [newcomer] if is_router else self._serving_routers()
        known = self._announced() if is_router else (newcomer,)
        return [
            Announce(router.name, p.name, p.life, p.address, p.kind)
            for router in routers
            for p in known
            if p.address is not None
        ]

    def _serving_routers(self) -> list[Process]:
        return [router for router in self.routers.values() if router.state is State.SERVING]

    def _announced(self) -> tuple[Process, ...]:
        return (*self.workers.values(), *self.pools.processes())

    def _joined(self, event: ProcessJoined) -> list[SupervisorCommand]:
        joined, router = self._current(event.name, event.life), self.routers[event.router]
        if joined is None or {joined.state, router.state} != {State.SERVING}:
            return []
        if event.refused is not None:
            text = f"{event.router} refused {event.name}: {event.refused}"
            return self._fail(text) if self._may_give_up() else [Note(text)]
        joined.joined.add(event.router)
        if self.phase is Phase.STARTING and self._all_joined():
            return self._be_ready()
        return []

    def _all_joined(self) -> bool:
        return all(p.joined == self.routers.keys() for p in self._announced())

    def _lost(self, event: Lost, now_s: float) -> list[SupervisorCommand]:
        process = self._current(event.name, event.life)
        if process is None or process.state not in (State.STARTING, State.SERVING):
            return []
        if self._hopeless(process, event):
            return self._fail(f"{process.name}: {event.reason}")
        address = process.address
        if event.fatal and process.kind is ProcessKind.POOL_NODE and not self._pool_required:
            return self._leave_out(process, event.reason)
        wait_s = process.back_off(now_s)
        self._forget_router(process.name)
        note = Note(f"{process.name} is lost: {event.reason}; starting it again in {wait_s:g} s")
        return [note, *self._withdrawal(process, address), Remove(process.name)]

    def _leave_out(self, pool: Process, reason: str) -> list[SupervisorCommand]:
        """Another start would fail in the same way, and the cluster can do without it."""
        pool.state, pool.left_out = State.LEFT_OUT, reason
        pool.address, pool.joined = None, set()
        return [Note(f"{pool.name} is left out: {reason}"), Remove(pool.name)]

    def _forget_router(self, name: str) -> None:
        for process in self._announced():
            process.joined.discard(name)

    def _hopeless(self, process: Process, event: Lost) -> bool:
        """A process that never served, in a cluster that is starting, holds up the start."""
        if process.served_s is not None or not self._may_give_up():
            return False
        return event.fatal or process.failures + 1 >= STARTS_BEFORE_FATAL

    def _withdrawal(self, process: Process, address: str | None) -> list[SupervisorCommand]:
        if process.kind is ProcessKind.ROUTER or address is None:
            return []
        return [Withdraw(one.name, address, process.kind) for one in self._serving_routers()]

    # Stopping

    def _fail(self, error: str) -> list[SupervisorCommand]:
        self.error = error
        return self._stop(error)

    def _stop(self, why: str) -> list[SupervisorCommand]:
        """Routers stop first: they finish running requests, which needs the workers. Then the
        workers stop, which still store KV in pool nodes. Pool nodes stop last."""
        if self.phase in (Phase.STOPPING, Phase.STOPPED):
            return []
        self.phase = Phase.STOPPING
        return [Note(f"stopping: {why}"), *map(self._stop_process, self.routers.values())]

    def _stopped(self, name: str, now_s: float) -> list[SupervisorCommand]:
        process = self._named(name)
        assert process is not None, name
        process.state = State.GONE
        if process.kind is ProcessKind.ROUTER:
            return self._router_stopped()
        if self.phase is not Phase.STOPPING:
            return self._settle_pools(now_s)
        left = [p for p in self.processes() if p.state is not State.GONE]
        if not left:
            self.phase = Phase.STOPPED
        elif all(p.kind is ProcessKind.POOL_NODE for p in left):
            return [self._stop_process(p) for p in left if p.state is not State.STOPPING]
        return []

    def _router_stopped(self) -> list[SupervisorCommand]:
        """After the last router, the workers stop."""
        if any(router.state is not State.GONE for router in self.routers.values()):
            return []
        return [self._stop_process(worker) for worker in self.workers.values()]

    def _stop_process(self, process: Process) -> SupervisorCommand:
        drain = process.state is State.SERVING
        process.state, process.address, process.joined = State.STOPPING, None, set()
        self._forget_router(process.name)
        return StopProcess(process.name, drain)

    def _named(self, name: str) -> Process | None:
        return self.routers.get(name) or self.workers.get(name) or self.pools.find(name)

    def _current(self, name: str, life: int) -> Process | None:
        process = self._named(name)
        return process if process is not None and process.life == life else None
