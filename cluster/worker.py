"""One worker process: engine, block tables, both schedulers, transfer thread and gRPC face.

The same object serves as `kvrelay worker` and inside a Ray actor. Four threads: the event loop
(gRPC), the loop's thread (all decisions), the device thread (the model), the transfer thread
(collation).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from uuid import uuid4

from cluster.device import Device
from cluster.grpc_server import bind_port, grpc_server
from cluster.kv_report import kv_report
from cluster.mover import Mover
from cluster.peers import PeerLinks
from cluster.settings import WorkerSettings
from cluster.worker_events import Call, Close, Crashed, Incoming
from cluster.worker_loop import WorkerLoop
from cluster.worker_service import WorkerService
from decode_worker.batch import Batch
from decode_worker.receiver import Receiver
from decode_worker.scheduler import DecodeScheduler
from engine.checkpoint import open_checkpoint
from engine.load import load_engine
from engine.runner import Engine
from engine.sizing import EngineLimits
from engine.threads import use_threads
from kvpool.handoff import PeerHello
from kvpool.leases import LeaseTable
from kvpool.memory_collate import slab_bytes
from kvpool.plan import chunk_bytes
from kvpool.slabs import SlabPool
from kvpool.tables import BlockTables
from kvrelay.messages import WorkerHello
from kvrelay.types import WIRE_VERSION, Incarnation
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc
from prefill_worker.scheduler import PrefillScheduler

log = logging.getLogger(__name__)

__all__ = ["WorkerProcess", "WorkerSettings"]


@dataclass(slots=True)
class _Parts:
    """What a started worker is made of."""

    loop: WorkerLoop
    device: Device
    links: PeerLinks
    mover: Mover
    hello: WorkerHello
    tables: BlockTables


class WorkerProcess:
    """Start once, stop once. `wait_closed` tells when, and why, the worker has stopped."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        self._closed: Future[None] = Future()
        self._parts: _Parts | None = None

    async def start(self) -> str:
        """Load the model and serve; "HOST:PORT" of the gRPC server.

        Raises ModelError or ConfigError.
        """
        self._thread = threading.Thread(target=self._run, name="kvrelay-loop", daemon=True)
        started: Future[_Parts] = Future()
        self._started = started
        self._thread.start()
        parts = await asyncio.wrap_future(started)
        self._parts = parts
        self._server = grpc_server()
        service = WorkerService(parts.hello, self._inbox, self._report)
        worker_pb2_grpc.add_WorkerServicer_to_server(service, self._server)
        host = self._settings.host
        port = bind_port(self._server, host, self._settings.port_range)
        await self._server.start()
        return f"{host}:{port}"

    async def stop(self, *, drain_s: float) -> None:
        """Refuse new work, finish what runs for up to `drain_s`, then release everything."""
        parts = self._parts
        if parts is None:
            return
        self._parts = None
        parts.loop.draining = True
        deadline_s = time.monotonic() + drain_s
        while time.monotonic() < deadline_s and self._thread.is_alive() and not parts.loop.idle:
            await asyncio.sleep(0.02)
        await self._server.stop(grace=None)
        self._inbox.put(Close())
        await asyncio.to_thread(self._thread.join)

    async def wait_closed(self) -> None:
        """Returns once stopped; raises what the worker died of."""
        await asyncio.shield(asyncio.wrap_future(self._closed))

    # --- loop thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            parts = self._build()
        except BaseException as error:
            self._started.set_exception(error)
            self._closed.set_result(None)
            return
        self._started.set_result(parts)
        try:
            parts.loop.run()
            self._closed.set_result(None)
        except BaseException as error:
            log.exception("worker %s died", self._settings.name)
            self._closed.set_exception(error)
        finally:
            parts.device.close()
            parts.mover.close()
            parts.links.close()

    def _build(self) -> _Parts:
        settings = self._settings
        if settings.cpu_threads is not None:
            use_threads(settings.cpu_threads)
        engine = self._load()
        layout, blocks = engine.layout, engine.memory.blocks
        tables = BlockTables(layout, blocks)
        slab_tokens = settings.slab_tokens or settings.prefill_chunk_tokens
        physical = f"{layout.physical_format()}/slab{slab_tokens}"
        incarnation = Incarnation(uuid4().hex)
        scheme = settings.transports[0]
        hello = PeerHello(
            wire_version=WIRE_VERSION,
            incarnation=incarnation,
            fingerprint=engine.facts.fingerprint,
            physical_format=physical,
        )
        links = PeerLinks(scheme, hello, self._inbox.put, host=settings.host)
        mover = Mover(
            engine.memory,
            links,
            engine.facts.fingerprint,
            slabs=settings.staging_slabs,
            slab_tokens=slab_tokens,
            post=self._inbox.put,
            crashed=lambda error: self._inbox.put(Crashed(error)),
        )
        receiver = Receiver(
            tables=tables,
            slabs=SlabPool(chunk_bytes(layout, slab_tokens), settings.staging_slabs),
            regions={slab: region.name for slab, region in mover.regions.items()},
            leases=LeaseTable(settings.lease_ttl_s),
        )
        prefill = PrefillScheduler(
            tables=tables,
            chunk_tokens=settings.prefill_chunk_tokens,
            slab_tokens=slab_tokens,
        )
        longrope = engine.model.longrope
        decode = DecodeScheduler(
            receiver=receiver,
            batch=Batch(
                tables=tables,
                chunk_tokens=settings.prefill_chunk_tokens,
                rope_border_tokens=longrope.border_tokens if longrope is not None else None,
            ),
            max_running=settings.max_running_requests,
        )
        device = Device(engine, settings.cpu_threads, self._inbox.put)
        loop = WorkerLoop(device, tables, prefill, decode, self._inbox)
        loop.attach(links, mover)
        mover.start()
        device.start()
        self._log_start(engine, slab_bytes(layout, slab_tokens))
        worker_hello = self._hello(engine, incarnation, links, scheme)
        return _Parts(loop, device, links, mover, worker_hello, tables)

    def _load(self) -> Engine:
        settings = self._settings
        limits = EngineLimits(
            max_model_len=settings.max_model_len,
            prefill_chunk_tokens=settings.prefill_chunk_tokens,
            max_running_requests=settings.max_running_requests,
            memory_fraction=settings.memory_fraction,
            kv_memory_bytes=settings.kv_memory_bytes,
            share=settings.device_share,
            staging_slabs=settings.staging_slabs,
            slab_tokens=settings.slab_tokens or settings.prefill_chunk_tokens,
        )
        return load_engine(
            open_checkpoint(settings.model, settings.revision),
            device=settings.device,
            dtype=settings.dtype,
            block_size=settings.block_size,
            blocks=None,
            limits=limits,
        )

    def _hello(
        self, engine: Engine, incarnation: Incarnation, links: PeerLinks, scheme: str
    ) -> WorkerHello:
        settings, facts = self._settings, engine.facts
        return WorkerHello(
            name=settings.name,
            incarnation=incarnation,
            role=settings.role,
            device=facts.device,
            transport=scheme,
            transfer_address=links.endpoint.address,
            fingerprint=facts.fingerprint,
            architecture=facts.architecture,
            block_size=engine.layout.block_size,
            total_blocks=engine.memory.blocks,
            max_model_len=facts.max_model_len,
            max_running_requests=settings.max_running_requests,
            prefill_chunk_tokens=settings.prefill_chunk_tokens,
            vocab_size=facts.vocab_size,
        )

    def _log_start(self, engine: Engine, slab: int) -> None:
        settings = self._settings
        log.info("%s on %s: %s", settings.role, engine.facts.device, engine.sizing.reason)
        log.info(
            "%d staging slabs of %.1f MiB over %s",
            settings.staging_slabs,
            slab / 2**20,
            settings.transports[0],
        )

    def _report(self) -> pb.DebugKvResponse:
        """Taken between two steps, so it is consistent."""
        answer: Future[pb.DebugKvResponse] = Future()
        parts = self._parts
        if parts is None:
            return pb.DebugKvResponse(worker=self._settings.name)
        receiver = parts.loop.decode.receiver

        def take() -> None:
            now_s = time.monotonic()
            answer.set_result(kv_report(parts.hello, parts.tables, receiver, now_s))

        self._inbox.put(Call(take))
        return answer.result(timeout=30)
