"""Decides which processes of a cluster to start, announce, restart and stop. Pure.

`handle(event, now_s)` is the only door. The shell (the controller actor) turns commands into
processes and what happens to them into the next event. Every start of a process has a number, its
`life`; what an older life says is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import assert_never

from cluster.pool.homes import PoolHomes
from cluster.supervised import STARTS, STARTS_BEFORE_FATAL, Limits, Process
from cluster.supervision import (
    Announce,
    Answered,
    Command,
    Does,
    DriverSeen,
    Event,
    Joined,
    Kind,
    Lost,
    Note,
    Phase,
    Placed,
    Remove,
    Serving,
    Start,
    State,
    Stop,
    StopAsked,
    Stopped,
    Tick,
    Withdraw,
)
from cluster.watching import Watching
from engine.activity import Stage

REMIND_S = 10.0


class Supervisor:
    """One cluster: routers, their workers, and a pool node where they are if it has any."""

    def __init__(
        self,
        routers: Iterable[str],
        needs: Mapping[str, str],
        limits: Limits,
        now_s: float,
        *,
        pool_needs: str | None = None,
    ) -> None:
        """`needs`: # router or worker |-> what it asks of Ray, in words; `pool_needs`: a pool node,
        or None when there shall be none."""
        self.routers = {name: Process(name=name, kind=Kind.ROUTER) for name in routers}
        self.workers = {
            name: Process(name=name, kind=Kind.WORKER) for name in needs if name not in self.routers
        }
        self.pools = PoolHomes()
        self._needs = needs
        self._pool_needs = pool_needs
        self._remind_at_s = now_s + REMIND_S
        self.phase = Phase.STARTING
        self.error: str | None = None
        self._limits = limits
        self._started_s = now_s
        self._driver_seen_s = now_s
        self._watching = Watching(timeout_s=limits.hang_timeout_s, looked_s=now_s)
        for process in self.processes():
            process.state = State.BACKING_OFF

    def processes(self) -> tuple[Process, ...]:
        return (*self.routers.values(), *self._announced())

    def handle(self, event: Event, now_s: float) -> list[Command]:
        match event:
            case Tick():
                return self._tick(now_s)
            case Placed():
                return self._placed(event, now_s)
            case Does():
                return self._does(event)
            case Serving():
                return self._serving(event, now_s)
            case Lost():
                return self._lost(event, now_s)
            case Joined():
                return self._joined(event)
            case Answered(name=name, life=life):
                if (process := self._current(name, life)) is not None:
                    process.hears(now_s)
                return []
            case Stopped(name=name):
                return self._stopped(name, now_s)
            case DriverSeen():
                self._driver_seen_s = now_s
                return self._tick(now_s)
            case StopAsked():
                return self._stop("asked to stop")
            case _:
                assert_never(event)

    def validate(self) -> None:
        """A process serves exactly when it has an address, and is known to routers that serve; a
        stopped cluster has none left."""
        serving = {router.name for router in self._serving_routers()}
        states = {process.state for process in self.processes()}
        assert self.phase is not Phase.STOPPED or states == {State.GONE}, states
        assert self.phase is not Phase.STARTING or State.GONE not in states, states
        for process in self.processes():
            assert (process.state is State.SERVING) == (process.address is not None), process
            assert process.state is State.SERVING or not process.joined, process
            assert process.joined <= serving, process

    # Starting and restarting

    def _tick(self, now_s: float) -> list[Command]:
        if self.phase in (Phase.STOPPING, Phase.STOPPED):
            return []
        if self._driver_is_gone(now_s):
            return self._stop("the serve command is gone")
        late = now_s - self._started_s > self._limits.startup_timeout_s
        if self.phase is Phase.STARTING and late:
            return self._fail(f"{self._missing()} did not start in time; is there room for it?")
        due = [p for p in self.processes() if p.is_due(now_s)]
        started = [command for p in due for command in self._start(p)]
        return [*started, *self._watch(now_s), *self._reminder(now_s)]

    def _reminder(self, now_s: float) -> list[Command]:
        """Every so often what a start still waits for."""
        if self.phase is not Phase.STARTING or now_s < self._remind_at_s:
            return []
        self._remind_at_s = now_s + REMIND_S
        waiting = [(p.name, doing) for p in self.processes() if (doing := self.doing(p))]
        told = ", ".join(f"{name}: {doing}" for name, doing in waiting)
        return [Note(f"still waiting for {told}")] if waiting else []

    def doing(self, process: Process) -> str:
        """What it does now, in words; nothing once it serves and every router knows it."""
        match process.state:
            case State.STARTING if process.activity.stage is Stage.WAITS:
                needs = self._needs.get(process.name, self._pool_needs)
                return f"{process.activity}, needs {needs}"
            case State.STARTING:
                return str(process.activity)
            case State.SERVING:
                knows_all = process.kind is Kind.ROUTER or process.joined == self.routers.keys()
                return "" if knows_all else "joins"
            case state:
                return state.value

    def _does(self, event: Does) -> list[Command]:
        process = self._current(event.name, event.life)
        if process is None or process.state is not State.STARTING:
            return []
        before, process.activity = process.activity.stage, event.activity
        if event.activity.stage is before:
            return []
        return [Note(f"{process.name} {self.doing(process)}")]

    def _driver_is_gone(self, now_s: float) -> bool:
        timeout_s = self._limits.driver_timeout_s
        return timeout_s is not None and now_s - self._driver_seen_s > timeout_s

    def _missing(self) -> str:
        return ", ".join(p.name for p in self.processes() if p.state is not State.SERVING)

    def _start(self, process: Process) -> list[Command]:
        process.life += 1
        process.state, process.activity = State.STARTING, STARTS
        home = process.home if process.kind is Kind.POOL_NODE else None
        start = Start(process.name, process.life, home.node if home else None)
        return [Note(f"starting {process.name} ..."), start]

    def _watch(self, now_s: float) -> list[Command]:
        """Those that don't answer are lost."""
        serving = [p for p in self.processes() if p.state is State.SERVING]
        asked, silent = self._watching.look(serving, now_s)
        reason = f"it has answered nothing for {self._watching.timeout_s:g} s"
        lost = (Lost(name=p.name, life=p.life, reason=reason) for p in silent)
        return [*asked, *(command for one in lost for command in self._lost(one, now_s))]

    def _placed(self, event: Placed, now_s: float) -> list[Command]:
        worker = self._current(event.name, event.life)
        if worker is None or worker.state not in (State.STARTING, State.SERVING):
            return []
        worker.home = event.home
        return self._settle_pools(now_s)

    def _settle_pools(self, now_s: float) -> list[Command]:
        if self._pool_needs is None or self.phase in (Phase.STOPPING, Phase.STOPPED):
            return []
        unwanted = self.pools.settle(self.workers.values(), now_s)
        return [command for pool in unwanted for command in self._retire(pool)]

    def _retire(self, pool: Process) -> list[Command]:
        note = Note(f"{pool.name} is stopped: no worker is there any more")
        return [note, *self._withdrawal(pool, pool.address), self._stop_process(pool)]

    def _serving(self, event: Serving, now_s: float) -> list[Command]:
        process = self._current(event.name, event.life)
        if process is None or process.state is not State.STARTING:
            return []
        process.state, process.address = State.SERVING, event.address
        process.served_s = now_s
        process.hears(now_s)
        note = Note(f"{process.name} serves on {event.address}")
        return [note, *self._announcements(process)]

    def _announcements(self, newcomer: Process) -> list[Command]:
        """All that serve to a new router; a newcomer to every router that serves."""
        is_router = newcomer.kind is Kind.ROUTER
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

    def _joined(self, event: Joined) -> list[Command]:
        joined, router = self._current(event.name, event.life), self.routers[event.router]
        if joined is None or {joined.state, router.state} != {State.SERVING}:
            return []
        if event.refused is not None:
            text = f"{event.router} refused {event.name}: {event.refused}"
            return self._fail(text) if self.phase is Phase.STARTING else [Note(text)]
        joined.joined.add(event.router)
        if self.phase is Phase.STARTING and self._all_joined():
            self.phase = Phase.READY
        return []

    def _all_joined(self) -> bool:
        return all(p.joined == self.routers.keys() for p in self._announced())

    def _lost(self, event: Lost, now_s: float) -> list[Command]:
        process = self._current(event.name, event.life)
        if process is None or process.state not in (State.STARTING, State.SERVING):
            return []
        if self._hopeless(process, event):
            return self._fail(f"{process.name}: {event.reason}")
        address = process.address
        wait_s = process.back_off(now_s)
        self._forget_router(process.name)
        note = Note(f"{process.name} is lost: {event.reason}; starting it again in {wait_s:g} s")
        return [note, *self._withdrawal(process, address), Remove(process.name)]

    def _forget_router(self, name: str) -> None:
        for process in self._announced():
            process.joined.discard(name)

    def _hopeless(self, process: Process, event: Lost) -> bool:
        """It never served, and what never did holds up a cluster that starts."""
        if process.served_s is not None or self.phase is not Phase.STARTING:
            return False
        return event.fatal or process.failures + 1 >= STARTS_BEFORE_FATAL

    def _withdrawal(self, process: Process, address: str | None) -> list[Command]:
        if process.kind is Kind.ROUTER or address is None:
            return []
        return [Withdraw(one.name, address, process.kind) for one in self._serving_routers()]

    # Stopping

    def _fail(self, error: str) -> list[Command]:
        self.error = error
        return self._stop(error)

    def _stop(self, why: str) -> list[Command]:
        """The routers first: they finish what runs, which needs the workers; then these, which
        still store in the pool nodes, and these at last."""
        if self.phase in (Phase.STOPPING, Phase.STOPPED):
            return []
        self.phase = Phase.STOPPING
        return [Note(f"stopping: {why}"), *map(self._stop_process, self.routers.values())]

    def _stopped(self, name: str, now_s: float) -> list[Command]:
        process = self._named(name)
        assert process is not None, name
        process.state = State.GONE
        if process.kind is Kind.ROUTER:
            return self._router_stopped()
        if self.phase is not Phase.STOPPING:
            return self._settle_pools(now_s)
        left = [p for p in self.processes() if p.state is not State.GONE]
        if not left:
            self.phase = Phase.STOPPED
        elif all(p.kind is Kind.POOL_NODE for p in left):
            return [self._stop_process(p) for p in left if p.state is not State.STOPPING]
        return []

    def _router_stopped(self) -> list[Command]:
        """The workers, after the last one."""
        if any(router.state is not State.GONE for router in self.routers.values()):
            return []
        return [self._stop_process(worker) for worker in self.workers.values()]

    def _stop_process(self, process: Process) -> Command:
        drain = process.state is State.SERVING
        process.state, process.address, process.joined = State.STOPPING, None, set()
        self._forget_router(process.name)
        return Stop(process.name, drain)

    def _named(self, name: str) -> Process | None:
        return self.routers.get(name) or self.workers.get(name) or self.pools.find(name)

    def _current(self, name: str, life: int) -> Process | None:
        process = self._named(name)
        return process if process is not None and process.life == life else None
