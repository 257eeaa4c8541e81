"""The detached Ray actor that owns all others of one cluster: the shell around the supervisor.

It outlives its driver just long enough to drain and remove every actor, itself included. When it
dies, Ray starts it again: it reads the cluster's record, finds its actors by their names, and goes
on where it was. An unexpected exception in one of its tasks restarts that task, one in its loop
restarts the whole controller.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import assert_never
from uuid import uuid4

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from cluster.core.members import Former
from cluster.core.supervision import (
    Announce,
    Does,
    DriverEnded,
    Home,
    Lost,
    NodesDrain,
    Note,
    Phase,
    PingProcess,
    Placed,
    ProcessAnswered,
    ProcessJoined,
    ProcessKind,
    ProcessStopped,
    Remove,
    Serving,
    SetRole,
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
from cluster.on_ray.asked import Asked, Denied, Granted
from cluster.on_ray.door import Door, DoorAt
from cluster.on_ray.driver import DriverAt, DriverState, state_of
from cluster.on_ray.fleet import (
    RETRY_S,
    Fleet,
    Handle,
    answer_of,
    draining_nodes,
    pending_requests,
    reason_of,
)
from cluster.on_ray.record import ClusterRecord, get_record, put_record, remove_record
from cluster.on_ray.reports import ClusterStatus, ControllerReport, ProcessStatus, waits_for_room
from cluster.on_ray.roles import Roles
from cluster.on_ray.wishes import Wishes
from cluster.process.logs import configure_logging
from engine.core.activity import Stage, StartActivity
from engine.core.own_time import OwnTime
from kvrelay.access.values import Access

log = logging.getLogger(__name__)

TOLD = (State.STARTING, State.SERVING, State.LEFT_OUT)
"""States in which there is more to say of a process."""
TICK_S = 0.5
STOP_GRACE_S = 10.0
"""A process that has not stopped this long after its drain is killed."""
SILENT_S = 3.0
"""If a process is silent for this long, the controller checks whether Ray has room for it."""
DRIVER_LOOK_S = 2.0
NODES_LOOK_S = 1.0
ROUTER_TRIES = 3
"""A router that fails so often to add a worker, for no known reason, has refused it."""
LAST_REPORT_S = 3.0
"""A stopped controller waits this long for its driver to read that it stopped."""
ROUTER_GONE = StartFailed("the router is gone")


class Controller:
    """Async actor. Its loop starts with it, so that a restarted controller continues by itself."""

    _record: ClusterRecord
    _fleet: Fleet
    _core: Supervisor
    _wishes: Wishes
    _roles: Roles

    def __init__(self, key: str) -> None:
        """`key`: that of the cluster's record."""
        configure_logging("controller")
        self._key = key
        self._id = uuid4().hex
        self._begun = asyncio.Event()
        self._events: asyncio.Queue[SupervisorEvent] = asyncio.Queue()
        self._notes: list[str] = []
        self._chosen: dict[str, str] = {}
        self._router_at: dict[str, RouterAt] = {}
        self._door = Door(self.wish)
        self._router_calls: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._last_report = asyncio.Event()
        self._tick_at_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def heartbeat(self, seen: int, stop: bool) -> ControllerReport:
        """For a driver that has `seen` this many notes. `stop`: it wants the cluster to stop."""
        await self._begun.wait()
        if stop:
            self._events.put_nowait(StopAsked())
        report = ControllerReport(
            controller=self._id,
            phase=self._core.phase,
            settled=self._wishes.are_settled,
            error=self._core.error,
            troubles=tuple(self._wishes.troubles()),
            notes=tuple(self._notes[seen:]),
            noted=len(self._notes),
            model=self._record.plan.routers[0].settings.served_model_name,
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
        await self._begun.wait()
        return ClusterStatus(
            name=self._record.plan.name,
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

    async def wish(self, wish: Asked) -> Granted | Denied:
        """That a router passes on, or `door` has heard."""
        await self._begun.wait()
        return await self._wishes.hear(wish)

    async def door(self) -> DoorAt:
        """Where it is asked to change the cluster: for those who may use this Ray."""
        await self._begun.wait()
        return await self._door.at(self._record.plan)

    async def access(self) -> Access:
        """How the routers are called from inside: for those who may use this Ray."""
        await self._begun.wait()
        return self._record.plan.routers[0].settings.access

    def _routers(self) -> tuple[RouterAt, ...]:
        """Routers that have served, in order."""
        known = self._router_at
        return tuple(known[name] for name in self._core.routers if name in known)

    # The loop: wait, decide, remember, act

    async def _run(self) -> None:
        try:
            record = await asyncio.to_thread(get_record, self._key)
            if record is not None:
                await self._supervise(record)
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
        except Exception:
            log.exception("the controller failed; Ray starts it again")
            await asyncio.sleep(RETRY_S)
            os._exit(1)

    async def _supervise(self, record: ClusterRecord) -> None:
        """Until the cluster has stopped."""
        await self._begin(record)
        event: SupervisorEvent = SupervisionTick()
        while self._core.phase is not Phase.STOPPED:
            commands = self._core.handle(event, time.monotonic())
            self._wishes.heard(event)
            if await self._remember():
                self._wishes.written()
            for command in commands:
                self._execute(command)
            event = await self._next_event()
        self._fleet.kill_strays()
        await self._linger()
        await self._door.close()
        await asyncio.to_thread(remove_record, self._key)

    async def _begin(self, record: ClusterRecord) -> None:
        self._record, self._fleet = record, Fleet(record.plan, own=record.own)
        left = frozenset(await asyncio.to_thread(self._fleet.names))
        self._core = _new_core(record, left)
        tell, say = self._events.put_nowait, self._notes.append
        self._wishes = Wishes(self._fleet, self._core, tell)
        self._roles = Roles(self._fleet, self._core, self._wishes, self._routers, tell, say)
        if left or record.phase is not Phase.STARTING:
            self._notes.append(f"the controller was restarted; the cluster was {record.phase}")
        self._begun.set()
        self._spawn("the watch of the nodes", self._watch_nodes)
        self._spawn("the keeping of the roles", self._roles.keep)
        if record.driver is not None:
            self._spawn("the watch of the driver", partial(self._watch_driver, record.driver))

    async def _remember(self) -> bool:
        """Before the commands are carried out. What fails is tried again after the next event."""
        phase, error = self._core.phase, self._core.error
        now = replace(
            self._record,
            plan=self._fleet.plan,
            phase=phase,
            error=error,
            kept=self._core.kept(),
            roles=dict(self._core.members.roles),
        )
        try:
            if now != self._record and phase is not Phase.STOPPED:
                await asyncio.to_thread(put_record, self._key, now)
        except Exception:
            log.exception("the cluster's record can't be written")
            return False
        self._record = now
        return True

    async def _next_event(self) -> SupervisorEvent:
        """A tick in time, however many other events there are."""
        wait_s = self._tick_at_s - time.monotonic()
        if wait_s > 0:
            with suppress(TimeoutError):
                return await asyncio.wait_for(self._events.get(), wait_s)
        self._tick_at_s = time.monotonic() + TICK_S
        return SupervisionTick()

    async def _linger(self) -> None:
        """Lets a driver that is still there read the last report before this actor ends."""
        try:
            await asyncio.wait_for(self._last_report.wait(), LAST_REPORT_S)
            await asyncio.sleep(TICK_S)
        except TimeoutError:
            log.info("no driver read the last report")

    async def _watch_nodes(self) -> None:
        while self._core.phase is not Phase.STOPPED:
            await asyncio.sleep(NODES_LOOK_S)
            if nodes := await asyncio.to_thread(draining_nodes):
                self._events.put_nowait(NodesDrain(nodes))

    async def _watch_driver(self, driver: DriverAt) -> None:
        while (state := await asyncio.to_thread(state_of, driver)) is DriverState.RUNS:
            await asyncio.sleep(DRIVER_LOOK_S)
        if state is DriverState.ENDED:
            self._events.put_nowait(DriverEnded())
        else:
            self._notes.append("the node of the serve command is gone; the cluster goes on")

    def _execute(self, command: SupervisorCommand) -> None:
        match command:
            case Start(name=name):
                self._spawn(f"the start of {name}", partial(self._start, command))
            case SetRole(name=name, role=role):
                self._spawn(f"the role {role} of {name}", partial(self._roles.set, command))
            case StopProcess(name=name):
                self._spawn(f"the stop of {name}", partial(self._stop, command))
            case Remove(name=name):
                self._fleet.kill(name)
            case Announce(router=router):
                self._spawn(f"a message to {router}", partial(self._announce, command))
            case Withdraw(router=router):
                self._spawn(f"a message to {router}", partial(self._withdraw, command))
            case PingProcess(name=name):
                self._spawn(f"a ping of {name}", partial(self._ping, command))
            case Note(text=text):
                log.debug(text)
                self._notes.append(text)
            case _:
                assert_never(command)

    def _spawn(self, what: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        task = asyncio.get_running_loop().create_task(self._try_until_done(what, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _try_until_done(
        self, what: str, work: Callable[[], Coroutine[None, None, None]]
    ) -> None:
        """Each task ends by itself once its process is another one."""
        while True:
            try:
                return await work()
            except Exception:
                log.exception("%s failed, and is tried again in %g s", what, RETRY_S)
            await asyncio.sleep(RETRY_S)

    # One process

    async def _start(self, command: Start) -> None:
        """From the creation to the end of the process, however it ends."""
        name, life = command.name, command.life
        try:
            serving = [router.internal_grpc for router in self._routers()]
            host = self._fleet.create(name, command.node, command.role, serving)
            self._spawn(f"following {name}", partial(self._follow, command, host))
            if self._core.members.find(name) is not None:
                self._spawn(f"placing {name}", partial(self._place, command, host))
            started = await answer_of(host.start)
            if isinstance(started, StartFailed):
                refused = Lost(name=name, life=life, reason=started.reason, fatal=True)
                self._events.put_nowait(refused)
                return
            address = self._adopt(started)
            self._events.put_nowait(Serving(name=name, life=life, address=address))
            await answer_of(host.wait_closed)
            reason = "it closed"
        except (RayError, ValueError) as error:
            reason = reason_of(error)
        except Exception as error:
            log.exception("%s could not be followed", name)
            reason = reason_of(error)
        self._events.put_nowait(Lost(name=name, life=life, reason=reason))

    async def _place(self, command: Start, host: Handle) -> None:
        with suppress(RayError):  # `_start` gets the error too
            home: Home = await answer_of(host.home)
            self._events.put_nowait(Placed(name=command.name, life=command.life, home=home))

    async def _follow(self, command: Start, host: Handle) -> None:
        """Its activity until it serves or is lost, and then what it chose, if it started before it
        could be asked; `_start` reports the loss."""
        heard: Doing | None = None
        asked: asyncio.Future[Doing] | None = None
        with suppress(RayError):
            while self._is_starting(command):
                asked = asked or asyncio.ensure_future(answer_of(host.doing))
                await asyncio.wait([asked], timeout=SILENT_S)
                if asked.done():
                    heard, asked = self._hear(command, asked.result(), heard), None
                elif heard is None:
                    await self._hear_nothing(command)
                await asyncio.sleep(TICK_S)
            asked = asked or asyncio.ensure_future(answer_of(host.doing))
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
        place = self._fleet.placement(name)
        return place is not None and waits_for_room(place.amounts(), pending_requests())

    def _is_starting(self, command: Start) -> bool:
        process = self._core.current(command.name, command.life)
        return process is not None and process.state is State.STARTING

    async def _ping(self, command: PingProcess) -> None:
        name, life = command.name, command.life
        if (host := self._fleet.find(name)) is not None and self._core.current(name, life):
            with suppress(RayActorError):  # `_start` reports a dead one
                await answer_of(host.answer)
                self._events.put_nowait(ProcessAnswered(name=name, life=life))

    def _adopt(self, started: str | RouterAt) -> str:
        if isinstance(started, str):
            return started
        self._router_at[started.name] = started
        self._fleet.keep_ports(started)
        return f"{started.http} and {started.grpc}"

    async def _stop(self, command: StopProcess) -> None:
        if (host := self._fleet.find(command.name)) is not None and command.drain:
            await self._drain(command, host)
        self._fleet.kill(command.name)
        self._events.put_nowait(ProcessStopped(name=command.name))

    async def _drain(self, command: StopProcess, host: Handle) -> None:
        times_s = self._fleet.plan.stop_times_s(lame_duck=command.lame_duck)
        limit_s = sum(times_s) + STOP_GRACE_S
        stopping = asyncio.ensure_future(answer_of(host.stop, *times_s))
        try:
            if not await _is_done(stopping, limit_s):
                log.warning("%s has not stopped after %g s", command.name, limit_s)
        except RayError as error:
            log.warning("%s did not stop well: %s", command.name, reason_of(error))

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
            for _ in range(ROUTER_TRIES):
                try:
                    return await self._ask_router_once(name, method, address)
                except RayTaskError as error:
                    log.exception("%s, %s of %s", name, method, address)
                    failed = StartFailed(reason_of(error))
                await asyncio.sleep(RETRY_S)
            return failed

    async def _ask_router_once(self, name: str, method: str, address: str) -> StartFailed | None:
        router = self._fleet.find(name)
        if router is None:
            return ROUTER_GONE
        try:
            answer: StartFailed | None = await answer_of(getattr(router, method), address)
        except RayActorError:
            return ROUTER_GONE
        return answer


def _new_core(record: ClusterRecord, left: frozenset[str]) -> Supervisor:
    plan, nodes = record.plan, record.plan.pool
    return Supervisor(
        plan.desired(),
        Limits(startup_timeout_s=plan.startup_timeout_s, hang_timeout_s=plan.hang_timeout_s),
        time.monotonic(),
        pool_needs=None if nodes is None else str(nodes.placement),
        pool_required=nodes is None or nodes.required,
        pool_revision="" if nodes is None else nodes.revision,
        former=Former(
            phase=record.phase, error=record.error, left=left, kept=record.kept, roles=record.roles
        ),
    )


async def _is_done(asked: asyncio.Future[None], limit_s: float) -> bool:
    """Within this time. A pause of this process is no part of it. Raises what the task raised."""
    own_time = OwnTime(most_s=2 * TICK_S, looked_s=time.monotonic())
    passed_s = 0.0
    while passed_s < limit_s and not asked.done():
        await asyncio.wait([asked], timeout=TICK_S)
        passed_s += own_time.since_last(time.monotonic())
    if asked.done():
        asked.result()
    return asked.done()
