"""The controller around its supervisor: its tasks, its record, and what it asks Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from itertools import chain, count
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from cluster.config.load import load_config
from cluster.core.changes import with_count
from cluster.core.plan import plan_cluster
from cluster.core.resolve import Site, resolve
from cluster.core.supervision import (
    Phase,
    ProcessAnswered,
    StopAsked,
    StopProcess,
    SupervisionTick,
)
from cluster.on_ray import controller as shell
from cluster.on_ray import driver, fleet
from cluster.on_ray.actor import Host, RouterAt, StartFailed
from cluster.on_ray.asked import Asked, Drain, Granted, Pending, Scale
from cluster.on_ray.controller import Controller
from cluster.on_ray.driver import DriverAt, DriverState, state_of
from cluster.on_ray.fleet import Fleet, answer_of
from cluster.on_ray.record import ClusterRecord
from cluster.process.site import local_site
from kvrelay.errors import ConfigError


@pytest.fixture
def record() -> ClusterRecord:
    site: Site = local_site()
    plan = plan_cluster(resolve(load_config(None), site))
    roles = {pool: wish.roles() for pool, wish in plan.desired().items()}
    return ClusterRecord(plan=plan, driver=None, roles=roles)


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(_: Controller) -> None: ...

    monkeypatch.setattr(Controller, "_run", nothing)
    monkeypatch.setattr(shell, "RETRY_S", 0.0)
    monkeypatch.setattr(fleet, "RETRY_S", 0.0)


def begun(record: ClusterRecord) -> Controller:
    controller = Controller("mine/1")
    controller._record, controller._fleet = record, Fleet(record.plan)
    controller._core = shell._new_core(record, frozenset())
    return controller


# --- tasks --------------------------------------------------------------------------------------


def test_a_task_that_fails_unexpectedly_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[int] = []
    said: list[str] = []
    monkeypatch.setattr(shell.log, "exception", lambda text, *args: said.append(text % args))

    async def work() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise KeyError("nobody expected it")

    async def run() -> None:
        controller = Controller("mine/1")
        controller._spawn("a ping of both-0", work)
        while controller._tasks:
            await asyncio.sleep(0)

    asyncio.run(run())
    assert len(tries) == 3
    assert said == ["a ping of both-0 failed, and is tried again in 0 s"] * 2


def test_ticks_come_in_time_however_many_events_there_are() -> None:
    async def run() -> int:
        controller = Controller("mine/1")
        controller._tick_at_s = shell.time.monotonic() + 0.05
        for events in range(1_000_000):
            controller._events.put_nowait(ProcessAnswered(name="both-0", life=1))
            if isinstance(await controller._next_event(), SupervisionTick):
                return events
        raise AssertionError("no tick")

    assert asyncio.run(run()) > 1


class Actor:
    """One method of an actor: raises or returns each of these in turn."""

    def __init__(self, *outcomes: object) -> None:
        self._outcomes = iter(outcomes)

    async def remote(self) -> object:
        outcome = next(self._outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def test_a_connection_that_breaks_is_no_death() -> None:
    broken = ActorUnavailableError("the connection broke", None)
    assert asyncio.run(answer_of(Actor(broken, broken, "here"))) == "here"
    with pytest.raises(ActorDiedError):
        asyncio.run(answer_of(Actor(broken, ActorDiedError())))


def test_a_pause_of_the_controller_is_no_part_of_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands still for ten minutes while it waits for five seconds."""
    passed_s = chain([0.0], count(600.0, 0.5))
    monkeypatch.setattr(shell, "TICK_S", 0.01)
    monkeypatch.setattr(shell, "time", SimpleNamespace(monotonic=lambda: next(passed_s)))

    async def run() -> bool:
        drained = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.025, drained.set_result, None)
        return await shell._is_done(drained, 5.0)

    assert asyncio.run(run())


class Stops:
    """An actor whose `stop` remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[float, ...]] = []
        self.stop = self

    async def remote(self, *times_s: float) -> None:
        self.told.append(times_s)


def test_a_lame_duck_has_more_time_before_it_is_killed(
    record: ClusterRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    host = Stops()

    async def done(asked: asyncio.Future[None], limit_s: float) -> bool:
        limits.append(limit_s)
        await asked
        return True

    async def run() -> None:
        for lame_duck in (True, False):
            command = StopProcess("router-0", drain=True, lame_duck=lame_duck)
            await begun(record)._drain(command, host)

    monkeypatch.setattr(shell, "_is_done", done)
    asyncio.run(run())
    drain_s, lame_duck_s = record.plan.drain_s, record.plan.routers[0].settings.lame_duck_s
    assert host.told == [(drain_s, lame_duck_s), (drain_s,)]
    assert lame_duck_s == 5.0 and limits[0] == limits[1] + lame_duck_s


# --- the record ---------------------------------------------------------------------------------


def test_the_phase_is_written_down_and_again_when_that_failed(
    record: ClusterRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[ClusterRecord] = []
    fails = [OSError("no head"), None, None]

    def put(key: str, now: ClusterRecord) -> None:
        assert key == "mine/1"
        if (error := fails.pop(0)) is not None:
            raise error
        written.append(now)

    monkeypatch.setattr(shell, "put_record", put)

    async def run() -> None:
        controller = begun(record)
        await controller._remember()
        assert len(fails) == 3, "nothing new"
        controller._core.handle(StopAsked(), 0.0)
        for _ in range(3):
            await controller._remember()

    asyncio.run(run())
    assert [one.phase for one in written] == [Phase.STOPPING]


class Store:
    """The record's, which can't be written while it is `broken`."""

    def __init__(self) -> None:
        self.broken = True
        self.tries = 0
        self.record: ClusterRecord | None = None

    def put(self, _: str, now: ClusterRecord) -> None:
        self.tries += 1
        if self.broken:
            raise OSError("no head")
        self.record = now


@pytest.fixture
def supervising(monkeypatch: pytest.MonkeyPatch) -> Store:
    """The controller's own loop, without the processes that it would start."""
    store = Store()
    monkeypatch.setattr(shell, "put_record", store.put)
    monkeypatch.setattr(shell, "TICK_S", 0.01)
    monkeypatch.setattr(Fleet, "names", lambda _: [])
    monkeypatch.setattr(Controller, "_spawn", lambda *_: None)
    monkeypatch.setattr(Controller, "_execute", lambda *_: None)
    return store


WISHES = [Scale("decode", 2), Drain(name="decode-0"), Drain(name="decode-0", replace=False)]


@pytest.mark.parametrize("wish", WISHES, ids=str)
def test_a_wish_is_granted_once_it_is_written_down(
    record: ClusterRecord, supervising: Store, wish: Asked
) -> None:
    """A controller that is killed before has granted nothing."""
    plan = with_count(record.plan, "decode", 3)

    async def run() -> bool:
        controller = Controller("mine/1")
        running = asyncio.ensure_future(controller._supervise(replace(record, plan=plan)))
        asking = asyncio.ensure_future(controller.wish(wish))
        tried = supervising.tries
        while supervising.tries < tried + 5:
            await asyncio.sleep(0.005)
        was_granted = asking.done()
        supervising.broken = False
        assert isinstance(await asking, Granted)
        assert await controller.wish(Pending()) != Granted(()), "asking waits for nothing"
        running.cancel()
        return was_granted

    assert not asyncio.run(run())
    stored = supervising.record
    assert stored is not None
    (pool,) = [one for one in stored.plan.worker_pools if one.name == "decode"]
    left = stored.kept["decode-0"].leaves if isinstance(wish, Drain) else False
    assert (pool.count, left) == {
        WISHES[0]: (2, False),
        WISHES[1]: (3, True),
        WISHES[2]: (2, True),
    }[wish]


def test_a_restarted_controller_knows_the_ports_of_its_routers(record: ClusterRecord) -> None:
    fleet = Fleet(record.plan)
    at = RouterAt(
        name="router-0",
        host="h",
        http_port=1,
        grpc_port=2,
        internal_host="i",
        internal_http_port=3,
        internal_grpc_port=4,
    )
    fleet.keep_ports(at)
    (router,) = fleet.plan.routers
    known = router.settings
    ports = (known.http_port, known.grpc_port, known.internal_http_port, known.internal_grpc_port)
    assert ports == (1, 2, 3, 4)
    assert replace(fleet.plan, routers=record.plan.routers) == record.plan


# --- the driver ---------------------------------------------------------------------------------


def jobs_of(*dead: str) -> Callable[[], list[dict[str, Any]]]:
    return lambda: [{"JobID": job, "IsDead": job in dead} for job in ("01", "02")]


@pytest.mark.parametrize(
    ("dead", "node", "state"),
    [
        ([], "here", DriverState.RUNS),
        (["02"], "here", DriverState.RUNS),
        (["01"], "here", DriverState.ENDED),
        (["01"], "gone", DriverState.LOST),
        (["01"], "unknown", DriverState.LOST),
    ],
)
def test_only_a_driver_that_ended_on_a_node_that_lives_has_ended(
    dead: list[str], node: str, state: DriverState, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"NodeID": "here", "Alive": True}, {"NodeID": "gone", "Alive": False}]
    monkeypatch.setattr(driver, "jobs", jobs_of(*dead))
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert state_of(DriverAt(job="01", node=node)) is state


# --- a host that two controllers ask -------------------------------------------------------------


class SlowHost(Host[str]):
    def __init__(self, error: Exception | None = None) -> None:
        self.starts = self.stops = 0
        self._error = error
        self.goes_on = asyncio.Event()

    async def _start(self) -> str:
        self.starts += 1
        await self.goes_on.wait()
        if self._error is not None:
            raise self._error
        return "127.0.0.1:1"

    async def _stop(self, drain_s: float) -> None:
        self.stops += 1
        await self.goes_on.wait()


async def twice(host: SlowHost, ask: Callable[[], Awaitable[object]]) -> Iterator[object]:
    """The first one who asks is killed before the answer."""
    first = asyncio.ensure_future(ask())
    await asyncio.sleep(0)
    first.cancel()
    second = asyncio.ensure_future(ask())
    await asyncio.sleep(0)
    assert not second.done()
    host.goes_on.set()
    return iter([await second, await ask()])


def test_a_start_that_is_asked_for_twice_is_one_start() -> None:
    async def run() -> None:
        host = SlowHost()
        assert [*await twice(host, host.start)] == ["127.0.0.1:1"] * 2
        assert host.starts == 1

    asyncio.run(run())


def test_a_start_that_fails_says_so_to_both() -> None:
    async def run() -> None:
        host = SlowHost(ConfigError("no config.json"))
        assert [*await twice(host, host.start)] == [StartFailed("no config.json")] * 2
        assert host.starts == 1

    asyncio.run(run())


def test_a_stop_that_is_asked_for_twice_is_one_stop() -> None:
    async def run() -> None:
        host = SlowHost()
        assert [*await twice(host, lambda: host.stop(1.0))] == [None, None]
        assert host.stops == 1

    asyncio.run(run())
