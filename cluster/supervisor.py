"""Decides which processes of a cluster to start, announce, restart and stop. Pure.

`handle(event, now_s)` is the only door. The shell (the controller actor) turns commands into
processes and what happens to them into the next event. Every start of a process has a number, its
`life`; what an older life says is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from cluster.supervision import (
    Announce,
    Command,
    DriverSeen,
    Event,
    Joined,
    Lost,
    Note,
    Phase,
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

ROUTER = "router-0"
REMIND_S = 10.0
FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 60.0
STABLE_S = 60.0
"""A process that served for so long starts its back-off anew."""
STARTS_BEFORE_FATAL = 3
"""A process that never served is given up after so many starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    startup_timeout_s: float
    driver_timeout_s: float | None
    """None: the cluster outlives its driver."""


@dataclass(slots=True, kw_only=True)
class Process:
    name: str
    state: State = State.GONE
    life: int = 0
    failures: int = 0
    served_s: float | None = None
    joined: bool = False
    address: str | None = None
    start_at_s: float = 0.0


class Supervisor:
    """One cluster: a router and its workers."""

    def __init__(self, needs: Mapping[str, str], limits: Limits, now_s: float) -> None:
        """`needs`: # process |-> what it asks of Ray, in words."""
        self.router = Process(name=ROUTER)
        self.workers = {name: Process(name=name) for name in needs if name != ROUTER}
        self._needs = needs
        self._remind_at_s = now_s + REMIND_S
        self.phase = Phase.STARTING
        self.error: str | None = None
        self._limits = limits
        self._started_s = now_s
        self._driver_seen_s = now_s
        for process in self.processes():
            process.state = State.BACKING_OFF

    def processes(self) -> tuple[Process, ...]:
        return (self.router, *self.workers.values())

    def handle(self, event: Event, now_s: float) -> list[Command]:
        match event:
            case Tick():
                return self._tick(now_s)
            case Serving():
                return self._serving(event, now_s)
            case Lost():
                return self._lost(event, now_s)
            case Joined():
                return self._joined(event)
            case Stopped(name=name):
                return self._stopped(name)
            case DriverSeen():
                self._driver_seen_s = now_s
                return self._tick(now_s)
            case StopAsked():
                return self._stop("asked to stop")
            case _:
                assert_never(event)

    def validate(self) -> None:
        """A process serves exactly when it has an address; a stopped cluster has none left."""
        states = {process.state for process in self.processes()}
        assert self.phase is not Phase.STOPPED or states == {State.GONE}, states
        assert self.phase is not Phase.STARTING or State.GONE not in states, states
        for process in self.processes():
            assert (process.state is State.SERVING) == (process.address is not None), process
            assert process.state is State.SERVING or not process.joined, process

    # Starting and restarting

    def _tick(self, now_s: float) -> list[Command]:
        if self.phase in (Phase.STOPPING, Phase.STOPPED):
            return []
        if self._driver_is_gone(now_s):
            return self._stop("the serve command is gone")
        late = now_s - self._started_s > self._limits.startup_timeout_s
        if self.phase is Phase.STARTING and late:
            return self._fail(f"{self._missing()} did not start in time; is there room for it?")
        due = [p for p in self.processes() if self._is_due(p, now_s)]
        return [command for p in due for command in self._start(p)] + self._reminder(now_s)

    def _reminder(self, now_s: float) -> list[Command]:
        """Every so often what a start still waits for."""
        if self.phase is not Phase.STARTING or now_s < self._remind_at_s:
            return []
        self._remind_at_s = now_s + REMIND_S
        waiting = [p.name for p in self.processes() if p.state is not State.SERVING]
        asked = ", ".join(f"{name}: needs {self._needs[name]}" for name in waiting)
        return [Note(f"still waiting for {asked}")] if waiting else []

    def _driver_is_gone(self, now_s: float) -> bool:
        timeout_s = self._limits.driver_timeout_s
        return timeout_s is not None and now_s - self._driver_seen_s > timeout_s

    def _is_due(self, process: Process, now_s: float) -> bool:
        return process.state is State.BACKING_OFF and process.start_at_s <= now_s

    def _missing(self) -> str:
        return ", ".join(p.name for p in self.processes() if p.state is not State.SERVING)

    def _start(self, process: Process) -> list[Command]:
        process.life += 1
        process.state = State.STARTING
        return [Note(f"starting {process.name} ..."), Start(process.name, process.life)]

    def _serving(self, event: Serving, now_s: float) -> list[Command]:
        process = self._current(event.name, event.life)
        if process is None or process.state is not State.STARTING:
            return []
        process.state, process.address = State.SERVING, event.address
        process.served_s = now_s
        note = Note(f"{process.name} serves on {event.address}")
        return [note, *self._announcements(process)]

    def _announcements(self, newcomer: Process) -> list[Command]:
        """Every serving worker to a new router; a new worker to the router, once there is one."""
        if self.router.state is not State.SERVING:
            return []
        known = self.workers.values() if newcomer is self.router else (newcomer,)
        return [Announce(p.name, p.life, p.address) for p in known if p.address is not None]

    def _joined(self, event: Joined) -> list[Command]:
        worker = self._current(event.name, event.life)
        if worker is None or worker.state is not State.SERVING:
            return []
        if event.refused is not None:
            text = f"the router refused {event.name}: {event.refused}"
            return self._fail(text) if self.phase is Phase.STARTING else [Note(text)]
        worker.joined = True
        if self.phase is Phase.STARTING and all(p.joined for p in self.workers.values()):
            self.phase = Phase.READY
        return []

    def _lost(self, event: Lost, now_s: float) -> list[Command]:
        process = self._current(event.name, event.life)
        if process is None or process.state not in (State.STARTING, State.SERVING):
            return []
        address = process.address
        process.failures = 1 if self._was_stable(process, now_s) else process.failures + 1
        if self._hopeless(process, event):
            return self._fail(f"{process.name}: {event.reason}")
        wait_s = min(FIRST_BACKOFF_S * 2 ** (process.failures - 1), LAST_BACKOFF_S)
        process.state, process.start_at_s = State.BACKING_OFF, now_s + wait_s
        note = Note(f"{process.name} is lost: {event.reason}; starting it again in {wait_s:g} s")
        return [note, *self._withdrawal(process, address), Remove(process.name)]

    def _was_stable(self, process: Process, now_s: float) -> bool:
        if process.state is not State.SERVING or process.served_s is None:
            return False
        return now_s - process.served_s >= STABLE_S

    def _hopeless(self, process: Process, event: Lost) -> bool:
        return process.served_s is None and (event.fatal or process.failures >= STARTS_BEFORE_FATAL)

    def _withdrawal(self, process: Process, address: str | None) -> list[Command]:
        process.address, process.joined = None, False
        if process is self.router or address is None or self.router.state is not State.SERVING:
            return []
        return [Withdraw(address)]

    # Stopping

    def _fail(self, error: str) -> list[Command]:
        self.error = error
        return self._stop(error)

    def _stop(self, why: str) -> list[Command]:
        """The router first: it finishes what runs, which needs the workers."""
        if self.phase in (Phase.STOPPING, Phase.STOPPED):
            return []
        self.phase = Phase.STOPPING
        return [Note(f"stopping: {why}"), self._stop_process(self.router)]

    def _stopped(self, name: str) -> list[Command]:
        process = self._named(name)
        process.state = State.GONE
        if process is self.router:
            return [self._stop_process(worker) for worker in self.workers.values()]
        if all(p.state is State.GONE for p in self.processes()):
            self.phase = Phase.STOPPED
        return []

    def _stop_process(self, process: Process) -> Command:
        drain = process.state is State.SERVING
        process.state, process.address, process.joined = State.STOPPING, None, False
        return Stop(process.name, drain)

    def _named(self, name: str) -> Process:
        return self.router if name == ROUTER else self.workers[name]

    def _current(self, name: str, life: int) -> Process | None:
        process = self._named(name)
        return process if process.life == life else None
