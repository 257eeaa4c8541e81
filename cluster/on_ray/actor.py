"""The Ray actors of a router, a worker and a pool node: thin shells around the same objects that
run as plain processes. No token and no KV passes through their methods."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from cluster.core.processes import STARTS
from cluster.core.settings import NODE_HOST, PoolNodeSettings, RouterSettings, WorkerSettings
from cluster.core.supervision import Home
from cluster.process.born import ledger_since
from cluster.process.host_cpus import give_way
from cluster.process.logs import configure_logging
from cluster.process.net import host_id
from engine.core.activity import Stage, StartActivity
from kvrelay.errors import KvrelayError
from kvrelay.gc_pauses import freeze, paused
from kvrelay.starts import StartLedger

if TYPE_CHECKING:
    from cluster.worker.process import WorkerProcess
    from router.live.link import WorkerLink


EVERY_INTERFACE = ("0.0.0.0", "::")
JOIN_TIMEOUT_S = 30.0
JOIN_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing:
    """The activity of a process that starts; `chosen`: its device and transports, or the memory of
    a pool node, once they are known."""

    activity: StartActivity = STARTS
    chosen: str = ""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The process can't serve, for the given reason; another start would fail in the same way."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterAt:
    """A router's name, its addresses for clients, and those for the people who run the cluster."""

    name: str
    host: str
    http_port: int
    grpc_port: int
    internal_host: str
    internal_http_port: int
    internal_grpc_port: int
    tls: bool = False
    internal_tls: bool = False

    @property
    def http(self) -> str:
        return f"{_scheme(self.tls)}://{self.host}:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"{self.host}:{self.grpc_port}"

    @property
    def internal_http(self) -> str:
        return f"{_scheme(self.internal_tls)}://{self.internal_host}:{self.internal_http_port}"

    @property
    def internal_grpc(self) -> str:
        return f"{self.internal_host}:{self.internal_grpc_port}"


def _scheme(tls: bool) -> str:
    return "https" if tls else "http"


Address = TypeVar("Address", str, RouterAt)


class Host(Generic[Address]):
    """One start and one stop. A restarted controller asks for them again, also while they are
    under way, and gets the same answer."""

    _starting: asyncio.Future[Address | StartFailed] | None = None
    _stopping: asyncio.Future[None] | None = None

    async def home(self) -> Home:
        """Answers before `start` loads anything."""
        return _home()

    async def start(self) -> Address | StartFailed:
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._try_start())
        return await asyncio.shield(self._starting)

    async def stop(self, drain_s: float) -> None:
        """Returns when the process has stopped."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop(drain_s))
        await asyncio.shield(self._stopping)

    async def _try_start(self) -> Address | StartFailed:
        try:
            address = await self._start()
        except KvrelayError as error:
            return StartFailed(str(error))
        freeze()
        return address

    async def _start(self) -> Address:
        raise NotImplementedError

    async def _stop(self, drain_s: float) -> None:
        raise NotImplementedError


class WorkerHost(Host[str]):
    """Async actor."""

    def __init__(self, settings: WorkerSettings, asked_at: float, routers: Sequence[str]) -> None:
        """`asked_at`: when its controller wanted it, by the wall clock. Hosts' clocks are close.
        `routers`: HOST:PORT of the internal gRPC of those that serve."""
        configure_logging(settings.name)
        give_way(settings.device)
        self._ledger = ledger_since(asked_at, os.getppid())
        self._settings = replace(settings, host=own_host(settings.host))
        self._routers = routers
        self._worker: WorkerProcess | None = None
        self._activity = STARTS

    async def doing(self) -> Doing:
        if self._worker is None:
            return Doing(activity=self._activity)
        return Doing(activity=self._worker.activity, chosen=self._worker.chosen)

    async def _start(self) -> str:
        self._activity = StartActivity(stage=Stage.IMPORTS)
        made = await asyncio.to_thread(_worker_maker)
        self._worker = made(self._settings, self._ledger, self._routers)
        return await self._worker.start()

    async def answer(self) -> None:
        """A heartbeat: shows that the worker doesn't hang."""
        assert self._worker is not None, "started"
        await self._worker.answer()

    async def wait_closed(self) -> None:
        assert self._worker is not None, "started"
        await self._worker.wait_closed()

    async def _stop(self, drain_s: float) -> None:
        if self._worker is not None:
            await self._worker.stop(drain_s=drain_s)


class PoolNodeHost(Host[str]):
    """Async actor."""

    def __init__(self, settings: PoolNodeSettings) -> None:
        configure_logging("pool-node")
        from cluster.pool_node.node import PoolNode

        self._node = PoolNode(replace(settings, host=own_host(settings.host)))

    async def doing(self) -> Doing:
        return Doing(chosen=self._node.chosen)

    async def _start(self) -> str:
        return (await self._node.start()).reports

    async def answer(self) -> None:
        """A heartbeat: shows that the pool node doesn't hang."""
        await self._node.answer()

    async def wait_closed(self) -> None:
        await self._node.wait_closed()

    async def _stop(self, drain_s: float) -> None:
        await self._node.stop(drain_s=drain_s)


class RouterHost(Host[RouterAt]):
    """Async actor; `add_worker` may be called again."""

    def __init__(self, settings: RouterSettings, controller: str, namespace: str) -> None:
        """`controller`: the name of its actor."""
        configure_logging(settings.process)
        from cluster.on_ray.door import ToController
        from cluster.router.process import RouterProcess

        self._settings = replace(settings, internal_host=own_host(settings.internal_host))
        self._router = RouterProcess(self._settings, ToController(controller, namespace))
        self._closed = asyncio.Event()
        self._lame_duck_s = 0.0

    async def doing(self) -> Doing:
        return Doing(activity=self._router.activity)

    async def add_worker(self, address: str) -> StartFailed | None:
        """Returns when requests can go to the worker, or the reason why they never can."""
        return await joined(await self._router.add_worker(address))

    async def remove_worker(self, address: str) -> None:
        await self._router.remove_worker(address)

    async def add_pool_node(self, address: str) -> None:
        await self._router.add_pool_node(address)

    async def remove_pool_node(self, address: str) -> None:
        await self._router.remove_pool_node(address)

    async def answer(self) -> None:
        """A heartbeat of the event loop, in which the whole router runs."""

    async def wait_closed(self) -> None:
        await self._closed.wait()

    async def stop(self, drain_s: float, lame_duck_s: float = 0.0) -> None:
        """Without `lame_duck_s` an earlier call's phase ends too."""
        self._lame_duck_s = lame_duck_s
        if not lame_duck_s:
            self._router.hurry()
        await super().stop(drain_s)

    async def _stop(self, drain_s: float) -> None:
        await self._router.stop(drain_s=drain_s, lame_duck_s=self._lame_duck_s)
        self._closed.set()

    async def _start(self) -> RouterAt:
        ports = await self._router.start()
        return RouterAt(
            name=self._settings.process,
            host=reachable(self._settings.host),
            http_port=ports.public.http,
            grpc_port=ports.public.grpc,
            internal_host=reachable(self._settings.internal_host),
            internal_http_port=ports.internal.http,
            internal_grpc_port=ports.internal.grpc,
            tls=self._settings.public_tls is not None,
            internal_tls=self._settings.access.serves is not None,
        )


def _worker_maker() -> Callable[[WorkerSettings, StartLedger, Sequence[str]], WorkerProcess]:
    """Imported late: PyTorch takes seconds."""
    with paused():
        from cluster.worker.last_words import LastWords
        from cluster.worker.process import WorkerProcess

    def made(
        settings: WorkerSettings, ledger: StartLedger, routers: Sequence[str]
    ) -> WorkerProcess:
        words = LastWords(settings.host, settings.port_range)
        return WorkerProcess(settings, words, ledger, lambda: routers)

    return made


def reachable(host: str) -> str:
    """The address by which others reach a listener on `host`."""
    return own_host(NODE_HOST) if host in EVERY_INTERFACE else host


def _home() -> Home:
    import ray

    return Home(host_id(), ray.get_runtime_context().get_node_id())


def own_host(host: str) -> str:
    import ray

    return str(ray.util.get_node_ip_address()) if host == NODE_HOST else host


async def joined(link: WorkerLink) -> StartFailed | None:
    """Once the worker has joined; or why it has not, as soon as it is refused."""
    until_s = time.monotonic() + JOIN_TIMEOUT_S
    while link.hello is None and not link.refusal and time.monotonic() < until_s:
        await asyncio.sleep(JOIN_POLL_S)
    if link.hello is not None:
        return None
    trouble = link.trouble or "it does not answer"
    return StartFailed(link.refusal or f"{link.address} did not join: {trouble}")
