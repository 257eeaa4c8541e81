"""The detached Ray actor that owns all others of one cluster: the shell around the supervisor.

It outlives its driver just long enough to drain and remove every actor, itself included. When it
dies, Ray starts it again, and it finds its actors by their names.

Also its reports to drivers and to `kvrelay status`, as values, and a pure test whether a process
waits for resources of Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import assert_never
from uuid import uuid4

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from cluster.core.plan import ClusterPlan, placements
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
from cluster.core.supervisor import Limits, Supervisor
from cluster.on_ray.actor import Doing, RouterAt, StartFailed
from cluster.on_ray.fleet import Fleet, Handle
from cluster.process.logs import configure_logging
from engine.core.activity import Stage, StartActivity

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerReport:
    """For the driver. `notes` are the new ones only, `noted` counts all. `controller` is another id
    after each start of the controller."""

    controller: str
    phase: Phase
    error: str | None
    notes: tuple[str, ...]
    noted: int
    model: str
    routers: tuple[RouterAt, ...]
    downloads: Mapping[str, StartActivity]
    """# process |-> progress of its download"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    name: str
    state: str
    address: str | None
    starts: int
    doing: str
    """Its activity while it starts, the reason if it is left out, else empty."""
    chosen: str
    """What it chose for itself on its machine, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    name: str
    phase: str
    routers: tuple[RouterAt, ...]
    processes: tuple[ProcessStatus, ...]


ROUNDING = 1e-3


def waits_for_room(
    asked: Mapping[str, float],
    all_asked: Iterable[Mapping[str, float]],
    before: Mapping[str, float],
    free: Mapping[str, float],
) -> bool:
    """`asked` is the request of one process, `all_asked` the sum over the cluster, this process
    included. `before` was free when the cluster began, and `free` is free now. If everything that
    was asked for is taken, this process has its resources and is only starting."""
    lacking = [name for name, amount in asked.items() if free.get(name, 0.0) + ROUNDING < amount]
    wanted = [*all_asked]
    return any(
        before.get(name, 0.0) - free.get(name, 0.0) + ROUNDING
        < sum(one.get(name, 0.0) for one in wanted)
        for name in lacking
    )


TOLD = (State.STARTING, State.SERVING, State.LEFT_OUT)
"""States in which there is more to say of a process."""
TICK_S = 0.5
STOP_GRACE_S = 10.0
"""A process that has not stopped this long after its drain is killed."""
SILENT_S = 3.0
"""If a process is silent for this long, the controller checks whether Ray has room for it."""
LAST_REPORT_S = 3.0
"""A stopped controller waits this long for its driver to read that it stopped."""
ROUTER_GONE = StartFailed("the router is gone")


class Controller:
    """Async actor. Its loop starts with it, so that a restarted controller continues by itself."""

    def __init__(self, plan: ClusterPlan, detach: bool) -> None:
        configure_logging("controller")
        self._plan = plan
        self._fleet = Fleet(plan)
        self._id = uuid4().hex
        self._events: asyncio.Queue[SupervisorEvent] = asyncio.Queue()
        self._notes: list[str] = []
        self._free_before = ray.available_resources()
        self._chosen: dict[str, str] = {}
        self._router_at: dict[str, RouterAt] = {}
        self._router_calls: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._last_report = asyncio.Event()
        former = self._fleet.names()
        self._core = self._new_core(detach, restarted=bool(former))
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._run())
        if former:
            self._spawn(self._recall(former))

    async def heartbeat(self, seen: int, stop: bool) -> ControllerReport:
        """The driver is alive and has `seen` this many notes; `stop`: it wants the cluster to
        stop."""
        self._events.put_nowait(StopAsked() if stop else DriverSeen())
        report = ControllerReport(
            controller=self._id,
            phase=self._core.phase,
            error=self._core.error,
            notes=tuple(self._notes[seen:]),
            noted=len(self._notes),
            model=self._plan.routers[0].settings.served_model_name,
            routers=self._routers(),
            downloads={
                p.name: p.activity
                for p in self._core.processes()
                if p.state is State.STARTING and p.activity.stage is Stage.DOWNLOADS
            },
        )
        if report.phase is Phase.STOPPED:
            self._last_report.set()
        return report

    async def status(self) -> ClusterStatus:
        return ClusterStatus(
            name=self._plan.name,
            phase=self._core.phase,
            routers=self._routers(),
            processes=tuple(
                ProcessStatus(
                    name=p.name,
                    state=p.state,
                    address=p.address,
                    starts=p.life,
                    doing=self._core.doing(p) if p.state in TOLD else "",
                    chosen=self._chosen.get(p.name, "") if p.state in TOLD else "",
                )
                for p in self._core.processes()
            ),
        )

    def _routers(self) -> tuple[RouterAt, ...]:
        """Routers that have served, in order."""
        known = self._router_at
        return tuple(known[name] for name in self._core.routers if name in known)

    # The loop: wait, decide, act

    def _new_core(self, detach: bool, *, restarted: bool) -> Supervisor:
        limits = Limits(
            startup_timeout_s=self._plan.startup_timeout_s,
            driver_timeout_s=None if detach else self._plan.driver_timeout_s,
            hang_timeout_s=self._plan.hang_timeout_s,
        )
        needs = {name: str(place) for name, place in placements(self._plan).items()}
        pool = self._plan.pool
        pool_needs = None if pool is None else str(pool.placement)
        routers = [router.settings.process for router in self._plan.routers]
        return Supervisor(
            routers,
            needs,
            limits,
            time.monotonic(),
            pool_needs=pool_needs,
            pool_required=pool is None or pool.required,
            restarted=restarted,
        )

    async def _run(self) -> None:
        try:
            event: SupervisorEvent = SupervisionTick()
            while self._core.phase is not Phase.STOPPED:
                for command in self._core.handle(event, time.monotonic()):
                    self._execute(command)
                event = await self._next_event()
            self._fleet.kill_strays()
            await self._linger()
            self._exit(restart=False)
        except Exception:
            log.exception("the controller failed; Ray starts it again")
            self._exit(restart=True)

    async def _next_event(self) -> SupervisorEvent:
        try:
            return await asyncio.wait_for(self._events.get(), TICK_S)
        except TimeoutError:
            return SupervisionTick()

    async def _linger(self) -> None:
        """Lets a driver that is still there read the last report before this actor ends."""
        try:
            await asyncio.wait_for(self._last_report.wait(), LAST_REPORT_S)
            await asyncio.sleep(TICK_S)
        except TimeoutError:
            log.info("no driver read the last report")

    def _exit(self, *, restart: bool) -> None:
        ray.kill(ray.get_runtime_context().current_actor, no_restart=not restart)

    def _execute(self, command: SupervisorCommand) -> None:
        match command:
            case Start():
                self._spawn(self._start(command))
            case StopProcess():
                self._spawn(self._stop(command))
            case Remove(name=name):
                self._fleet.kill(name)
            case Announce():
                self._spawn(self._announce(command))
            case Withdraw():
                self._spawn(self._withdraw(command))
            case PingProcess():
                self._spawn(self._ping(command))
            case Remember(name=name):
                self._spawn(self._remember(name))
            case Note(text=text):
                log.debug(text)
                self._notes.append(text)
            case _:
                assert_never(command)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the controller failed", exc_info=error)
            self._notes.append(f"controller: {_reason(error)}")

    # One process

    async def _start(self, command: Start) -> None:
        """From the creation to the end of the process, however it ends."""
        name, life = command.name, command.life
        try:
            host = self._fleet.create(name, command.node)
            self._spawn(self._follow(command, host))
            if name in self._core.workers:
                self._spawn(self._place(command, host.home.remote()))
            started = await host.start.remote()
            if isinstance(started, StartFailed):
                refused = Lost(name=name, life=life, reason=started.reason, fatal=True)
                self._events.put_nowait(refused)
                return
            address = self._adopt(started)
            self._events.put_nowait(Serving(name=name, life=life, address=address))
            await host.wait_closed.remote()
            reason = "it closed"
        except (RayError, ValueError) as error:
            reason = _reason(error)
        self._events.put_nowait(Lost(name=name, life=life, reason=reason))

    async def _place(self, command: Start, asked: asyncio.Future[Home]) -> None:
        with suppress(RayError):  # `_start` gets the error too
            home = await asked
            self._events.put_nowait(Placed(name=command.name, life=command.life, home=home))

    async def _follow(self, command: Start, host: Handle) -> None:
        """Its activity until it serves or is lost, and then what it chose, if it started before it
        could be asked; `_start` reports the loss."""
        heard: Doing | None = None
        asked: asyncio.Future[Doing] | None = None
        with suppress(RayError):
            while self._is_starting(command):
                asked = asked or asyncio.ensure_future(_answer(host.doing.remote()))
                await asyncio.wait([asked], timeout=SILENT_S)
                if asked.done():
                    heard, asked = self._hear(command, asked.result(), heard), None
                elif heard is None:
                    await self._hear_nothing(command)
                await asyncio.sleep(TICK_S)
            asked = asked or asyncio.ensure_future(_answer(host.doing.remote()))
            heard, asked = self._hear(command, await asked, heard), None
        if asked is not None:
            asked.cancel()

    def _hear(self, command: Start, doing: Doing, before: Doing | None) -> Doing:
        self._does(command, doing.activity)
        if doing.chosen and (before is None or doing.chosen != before.chosen):
            self._chosen[command.name] = doing.chosen
            self._notes.append(f"{command.name}: {doing.chosen}")
        return doing

    async def _hear_nothing(self, command: Start) -> None:
        waits = await asyncio.to_thread(self._waits_for_room, command.name)
        self._does(command, StartActivity(stage=Stage.WAITS if waits else Stage.STARTS))

    def _does(self, command: Start, activity: StartActivity) -> None:
        self._events.put_nowait(Does(name=command.name, life=command.life, activity=activity))

    def _waits_for_room(self, name: str) -> bool:
        asked = {name: place.amounts() for name, place in placements(self._plan).items()}
        if name not in asked:
            return False
        free = ray.available_resources()
        return waits_for_room(asked[name], asked.values(), self._free_before, free)

    def _is_starting(self, command: Start) -> bool:
        return any(
            p.name == command.name and p.life == command.life and p.state is State.STARTING
            for p in self._core.processes()
        )

    async def _ping(self, command: PingProcess) -> None:
        with suppress(RayError):  # `_start` reports a dead one
            await self._fleet.find(command.name).answer.remote()
            self._events.put_nowait(ProcessAnswered(name=command.name, life=command.life))

    async def _remember(self, name: str) -> None:
        with suppress(RayError):
            await self._fleet.find(name).remember_ready.remote()

    async def _recall(self, former: list[str]) -> None:
        """The first process that knows the cluster was READY decides it."""
        asked = [asyncio.ensure_future(self._recalls(name)) for name in former]
        was_ready = False
        with suppress(TimeoutError):
            for answer in asyncio.as_completed(asked, timeout=self._plan.hang_timeout_s):
                if was_ready := await answer:
                    break
        for task in asked:
            task.cancel()
        self._events.put_nowait(Recalled(was_ready=was_ready))

    async def _recalls(self, name: str) -> bool:
        process = self._fleet.find(name)
        with suppress(RayError):
            return process is not None and bool(await process.recall_ready.remote())
        return False

    def _adopt(self, started: str | RouterAt) -> str:
        if isinstance(started, str):
            return started
        self._router_at[started.name] = started
        self._fleet.keep_ports(started)
        return f"{started.http} and {started.grpc}"

    async def _stop(self, command: StopProcess) -> None:
        host = self._fleet.find(command.name)
        if host is not None and command.drain:
            await self._drain(command.name, host.stop.remote(self._plan.drain_s))
        self._fleet.kill(command.name)
        self._events.put_nowait(ProcessStopped(name=command.name))

    async def _drain(self, name: str, stopping: asyncio.Future[None]) -> None:
        try:
            await asyncio.wait_for(stopping, self._plan.drain_s + STOP_GRACE_S)
        except (RayError, TimeoutError) as error:
            log.warning("%s did not stop well: %s", name, _reason(error))

    # A router hears of others in the order of the commands; one that died, when it is back.

    async def _announce(self, command: Announce) -> None:
        method = "add_worker" if command.kind is ProcessKind.WORKER else "add_pool_node"
        refused = await self._ask_router(command.router, method, command.address)
        if refused is not ROUTER_GONE:
            reason = None if refused is None else refused.reason
            joined = ProcessJoined(
                name=command.name, life=command.life, router=command.router, refused=reason
            )
            self._events.put_nowait(joined)

    async def _withdraw(self, command: Withdraw) -> None:
        method = "remove_worker" if command.kind is ProcessKind.WORKER else "remove_pool_node"
        await self._ask_router(command.router, method, command.address)

    async def _ask_router(self, name: str, method: str, address: str) -> StartFailed | None:
        async with self._router_calls[name]:
            router = self._fleet.find(name)
            if router is None:
                return ROUTER_GONE
            try:
                answer: StartFailed | None = await getattr(router, method).remote(address)
            except RayActorError:
                return ROUTER_GONE
            return answer


async def _answer(asked: Awaitable[Doing]) -> Doing:
    return await asked


def _reason(error: BaseException) -> str:
    """The reason in one line."""
    match error:
        case RayTaskError():
            cause = error.cause
            return f"{type(cause).__name__}: {cause}".splitlines()[0]
        case RayActorError() if "creation task" in str(error):
            return str(error).strip().splitlines()[-1]
        case RayActorError():
            return "its process died"
        case _:
            return str(error).splitlines()[0] if str(error) else type(error).__name__
