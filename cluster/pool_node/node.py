"""One pool node process: a host tier in shared memory and a disk tier, for a cluster's workers.

KV that a worker has stored here outlives it. Threads: the loop (all decisions), the disk, those of
the links, and one per worker that is sent messages. When the node dies, its memory is gone and
workers recompute; the next node finds the blocks on disk.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from uuid import uuid4

from cluster.config.types import format_size
from cluster.core.settings import PoolNodeSettings
from cluster.pool_node.loop import Drain, HeartbeatAsked, PoolInbox, PoolLoop, open_files
from cluster.pool_node.service import PoolNodeService
from cluster.pool_node.workers import PoolWorkers
from cluster.process.auto import far_transports, settle_pool
from cluster.process.net import bind_port, grpc_server
from engine.device.host_memory import total_bytes
from kvpool.disk.files import DiskFiles
from kvpool.transport.endpoints import EndpointOptions
from kvpool.transport.rdma.ucx_options import UcxOptions
from kvrelay.errors import ConfigError
from kvrelay.types import Incarnation
from kvrelay.v1 import pool_node_pb2_grpc

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAddresses:
    """`links` are the addresses for workers, `reports` is HOST:PORT of its gRPC service."""

    links: tuple[str, ...]
    reports: str


class PoolNode:
    """Start once, stop once. `wait_closed` tells when and why the node has stopped. `chosen` says
    how much memory it took, once that is known."""

    def __init__(self, settings: PoolNodeSettings) -> None:
        self.chosen = ""
        self._settings = settings
        self._inbox: PoolInbox = queue.SimpleQueue()
        self._closed: Future[None] = Future()
        self._thread: threading.Thread | None = None

    async def start(self) -> PoolAddresses:
        """Loads the index of the disk tier and listens. Raises ConfigError."""
        self._settings, self.chosen = settle_pool(self._settings)
        loop, workers = await asyncio.to_thread(self._build)
        self._thread = threading.Thread(
            target=self._run, args=(loop, workers), name="kvrelay-pool", daemon=True
        )
        self._thread.start()
        try:
            return PoolAddresses(links=workers.addresses, reports=await self._serve())
        except BaseException:
            await self.stop(drain_s=0.0)
            raise

    async def _serve(self) -> str:
        self._server = grpc_server(self._settings.access)
        service = PoolNodeService(self._inbox.put)
        pool_node_pb2_grpc.add_PoolNodeServicer_to_server(service, self._server)
        settings = self._settings
        port = bind_port(self._server, settings.host, settings.port_range, settings.access)
        await self._server.start()
        return f"{settings.host}:{port}"

    async def stop(self, *, drain_s: float) -> None:
        """Accepts nothing new. For up to `drain_s`, transfers may end and blocks reach the disk."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(Drain(drain_s=drain_s))
            await asyncio.to_thread(thread.join)
            await self._server.stop(grace=None)

    async def answer(self) -> None:
        """A heartbeat: returns once the loop has handled it."""
        answer: Future[None] = Future()
        self._inbox.put(HeartbeatAsked(answer))
        await asyncio.wrap_future(answer)

    async def wait_closed(self) -> None:
        """Returns once the node has stopped. Raises the error that it died of."""
        await asyncio.shield(asyncio.wrap_future(self._closed))

    def _build(self) -> tuple[PoolLoop, PoolWorkers]:
        settings = self._settings
        assert settings.host_bytes is not None, "settled"
        _check_memory(settings.host_bytes)
        incarnation = Incarnation(uuid4().hex)
        workers = PoolWorkers(
            settings.name,
            incarnation,
            memory_bytes=settings.host_bytes,
            transports=far_transports(settings),
            options=EndpointOptions(
                host=settings.host,
                port_range=settings.port_range,
                secret=settings.access.token,
                ucx=UcxOptions(**dict(settings.ucx)),  # type: ignore[arg-type]
            ),
            post=self._inbox.put,
        )
        files: DiskFiles | None = None
        try:
            files = open_files(settings)
            loop = PoolLoop(settings, incarnation, workers, files, self._inbox)
            loop.load()
        except BaseException:
            workers.close()
            if files is not None:
                files.close()
            raise
        return loop, workers

    def _run(self, loop: PoolLoop, workers: PoolWorkers) -> None:
        try:
            loop.run()
        except BaseException as error:
            log.exception("the pool node died")
            workers.close()
            loop.close()
            self._closed.set_exception(error)
            return
        workers.close()
        loop.close()
        self._closed.set_result(None)


def _check_memory(host_bytes: int) -> None:
    total = total_bytes()
    if host_bytes > total:
        raise ConfigError(
            f"pool.host_memory: {format_size(host_bytes)}, but this machine or container has "
            f"{total / 2**30:.1f}GiB"
        )
