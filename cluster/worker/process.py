"""One worker process: engine, block tables, both schedulers, transfer threads and gRPC face.

The same object serves as `kvrelay worker` and inside a Ray actor. Its threads: the event loop
(gRPC), the loop's thread (all decisions), the device thread (the model), and for each peer and each
pool node one that sends messages and one that copies KV.

A worker's gRPC face: one Attach stream per router, and the view of every held block.

Every held block and slab of a worker, with holder and age: what `/debug/kv` shows.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import chain

import grpc

from cluster.core.settings import WorkerSettings
from cluster.core.worker.core import WorkerCore
from cluster.core.worker.events import FromRouter, RouterJoined, RouterLost
from cluster.core.worker.reports import PERIOD_S, ActivityLog, BlockReports
from cluster.process.auto import settle
from cluster.process.net import bind_port, grpc_server
from cluster.worker.build import WorkerParts, build_worker
from cluster.worker.checkpoint.fetch import open_with_peers
from cluster.worker.checkpoint.service import CheckpointService, OwnCheckpoint
from cluster.worker.events import Close, Incoming, RunOnLoop
from cluster.worker.last_words import LastWords, key_of
from engine.core.activity import PHASE_OF, Stage, StartActivity
from engine.device.threads import run_apart, use_threads
from kvpool.core.blocks.pool import BlockState
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.layout.hashes import TenantBlocks, most_of
from kvpool.wire.pool import cached_blocks
from kvrelay.counters import Counters
from kvrelay.errors import PeerError
from kvrelay.messages import BlockChanges, WorkerEvent, WorkerHello
from kvrelay.starts import StartLedger, StartPhase, start_text
from kvrelay.types import WIRE_VERSION, Role
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc
from kvrelay.wire import decode_to_worker, encode_batch, encode_hello

log = logging.getLogger(__name__)

LAST_WORDS_S = 1.0
"""A worker that closes waits so long for routers to hear its last events."""
STORE_S = 2.0
"""A worker that drains and has no request left waits so long for its pool node to take what is
new."""


class GrpcRouterStream:
    """The loop's side of one router's stream: encodes on the caller's thread, sends on ours."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._batches: asyncio.Queue[pb.FromWorker | None] = asyncio.Queue()

    def send(
        self,
        events: Sequence[WorkerEvent],
        counters: Counters,
        blocks: Sequence[BlockChanges] = (),
    ) -> None:
        batch = encode_batch(events, counters, time.monotonic(), blocks)
        self._loop.call_soon_threadsafe(self._batches.put_nowait, batch)

    def end(self) -> None:
        """The router has closed its side."""
        self._batches.put_nowait(None)

    async def batches(self) -> AsyncIterator[pb.FromWorker]:
        while (batch := await self._batches.get()) is not None:
            yield batch


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """`report` answers DebugKv; it may be called from any thread. `serves` hears whether routers
    can use the worker: the first that has joined it, and one that refuses it."""

    def __init__(
        self,
        hello: WorkerHello,
        inbox: queue.SimpleQueue[Incoming],
        report: Callable[[], pb.DebugKvResponse],
        take: Callable[[pb.SetStateRequest], Awaitable[pb.SetStateResponse]],
        ledger: StartLedger,
        serves: Callable[[bool], None],
    ) -> None:
        self._hello = hello
        self._serves = serves
        self._ledger = ledger
        self._inbox = inbox
        self._report = report
        self._take = take
        self._streams: set[GrpcRouterStream] = set()

    def end_streams(self) -> None:
        """Routers still hear all that was said."""
        for stream in self._streams:
            stream.end()

    async def Attach(  # noqa: N802
        self, requests: AsyncIterator[pb.ToWorker], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FromWorker]:
        await self._greet(requests, context)
        stream = GrpcRouterStream()
        self._streams.add(stream)
        self._inbox.put(RouterJoined(stream))
        reader = asyncio.ensure_future(self._read(stream, requests))
        try:
            yield pb.FromWorker(hello=encode_hello(self._greeting()))
            self._serves(True)
            async for batch in stream.batches():
                yield batch
        finally:
            reader.cancel()
            self._streams.discard(stream)
            self._inbox.put(RouterLost(stream))

    def _greeting(self) -> WorkerHello:
        """With the first one the start has ended."""
        is_new = self._ledger.end(time.monotonic())
        start = self._ledger.phases()
        if is_new:
            told = start_text({one.phase: one.seconds for one in start})
            log.info("%s serves after %s", self._hello.name, told)
        return replace(self._hello, start=start, is_new=is_new)

    async def _greet(
        self, requests: AsyncIterator[pb.ToWorker], context: grpc.aio.ServicerContext
    ) -> None:
        first = await anext(aiter(requests), None)
        theirs = first.hello.wire_version if first is not None else 0
        if theirs != WIRE_VERSION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this worker speaks wire version {WIRE_VERSION}, the router {theirs}: "
                "install the same kvrelay on both",
            )

    async def _read(self, stream: GrpcRouterStream, requests: AsyncIterator[pb.ToWorker]) -> None:
        try:
            async for message in requests:
                if message.HasField("refused"):
                    log.error("a router refuses this worker: %s", message.refused.reason)
                    self._serves(False)
                    return
                self._inbox.put(FromRouter(stream, decode_to_worker(message)))
        except PeerError as error:
            log.error("closed a router's stream: %s", error)
        finally:
            stream.end()

    async def DebugKv(  # noqa: N802
        self, request: pb.DebugKvRequest, context: grpc.aio.ServicerContext
    ) -> pb.DebugKvResponse:
        return await asyncio.to_thread(self._report)

    async def SetState(  # noqa: N802
        self, request: pb.SetStateRequest, context: grpc.aio.ServicerContext
    ) -> pb.SetStateResponse:
        if request.HasField("role") and request.role not in [*Role]:
            told = f"role {request.role}: expected {', '.join(Role)}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, told)
        return await self._take(request)


def kv_report(hello: WorkerHello, core: WorkerCore, now_s: float) -> pb.DebugKvResponse:
    tables, slabs = core.tables, core.decode.reservations.slabs
    counts = tables.counts()
    held = [
        pb.HeldBlocks(
            holder=str(entry.holder),
            state=entry.state.name.lower(),
            block_ids=list(chain.from_iterable(entry.tables)),
            age_s=now_s - entry.since_s,
            request_id=entry.holder.key.request_id,
        )
        for entry in tables.held()
    ]
    held_slabs = [
        pb.HeldSlab(slab_id=s.slab_id, state=s.state, holder=s.holder, age_s=s.age_s)
        for s in slabs.held(now_s)
    ]
    return pb.DebugKvResponse(
        worker=hello.name,
        incarnation=hello.incarnation,
        total_blocks=tables.blocks,
        free_blocks=counts[BlockState.FREE],
        leased_blocks=counts[BlockState.LEASED],
        active_blocks=counts[BlockState.ACTIVE],
        cached_blocks=counts[BlockState.CACHED],
        orphaned_blocks=tables.orphaned(),
        held=held,
        slabs=held_slabs,
        total_slabs=slabs.count,
        cached=map(cached_blocks, most_of(_cached(tables, core.reports, now_s))),
    )


def _cached(tables: BlockTables, reports: BlockReports, now_s: float) -> Iterator[TenantBlocks]:
    blocks: Counter[str] = Counter()
    ages_s: defaultdict[str, list[float]] = defaultdict(list)
    for run in tables.device.tree:
        if not run.holders:
            blocks[run.tenant] += run.blocks
            ages_s[run.tenant] += reports.ages_s(run.number, now_s)
    for tenant, ages in ages_s.items():
        yield TenantBlocks(
            tenant=tenant, blocks=blocks[tenant], oldest_s=max(ages), newest_s=min(ages)
        )


class WorkerProcess:
    """Start once, stop once. `wait_closed` tells when, and why, the worker has stopped. While it
    starts, `activity` is what it does now; `chosen` says which device and transports it took."""

    def __init__(
        self,
        settings: WorkerSettings,
        words: LastWords | None = None,
        ledger: StartLedger | None = None,
        routers: Callable[[], Sequence[str]] = tuple,
        serves: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`words`: what routers hear when it has died. `ledger`: of a start that has begun
        earlier. `routers`: HOST:PORT of their internal gRPC; they know workers that may have the
        model already. `serves` hears whether routers can use it."""
        self._settings = settings
        self._routers = routers
        self._own = OwnCheckpoint(settings.model, settings.revision)
        self._ledger = StartLedger(time.monotonic()) if ledger is None else ledger
        self._words = words
        self._serves = serves
        self._inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        self._closed: Future[None] = Future()
        self._parts: WorkerParts | None = None
        self.activity = StartActivity(stage=Stage.STARTS)
        self.chosen = ""
        self._logging: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None  # since it was first asked to

    async def start(self) -> str:
        """Load the model and serve; "HOST:PORT" of the gRPC server.

        Raises ModelError or ConfigError.
        """
        self._thread = threading.Thread(target=self._run, name="kvrelay-loop", daemon=True)
        started: Future[WorkerParts] = Future()
        self._started = started
        self._thread.start()
        parts = await asyncio.wrap_future(started)
        self._parts = parts
        self._ledger.enter(StartPhase.JOIN, time.monotonic())
        self._server = grpc_server(self._settings.access)
        hello = parts.hello
        self._service = WorkerService(
            hello, self._inbox, self._report, self._take_state, self._ledger, self._tell_serves
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(self._service, self._server)
        CheckpointService(self._own).add_to(self._server)
        settings = self._settings
        port = bind_port(self._server, settings.host, settings.port_range, settings.access)
        await self._server.start()
        self._logging = asyncio.create_task(self._log_activity(parts))
        return f"{settings.host}:{port}"

    async def stop(self, *, drain_s: float) -> None:
        """Refuses new work. What runs here goes on at other workers; what none of them has room for
        ends here, for up to `drain_s`. Its pool node takes what is new. Then all is released."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(drain_s))
        await asyncio.shield(self._leaving)  # whoever else wants it stopped waits for it too

    async def _leave(self, drain_s: float) -> None:
        parts, self._parts = self._parts, None
        if parts is not None:
            await self._stop(parts, drain_s)
        if self._words is not None:
            await asyncio.to_thread(self._words.close)

    async def _stop(self, parts: WorkerParts, drain_s: float) -> None:
        if self._logging is not None:
            self._logging.cancel()
        self._serves(False)
        core, deadline_s = parts.loop.core, time.monotonic() + drain_s
        self._inbox.put(RunOnLoop(core.drain))
        await self._until_empty(core, deadline_s)
        self._inbox.put(Close())
        await asyncio.to_thread(self._thread.join)
        self._service.end_streams()
        await self._server.stop(grace=LAST_WORDS_S)

    def _tell_serves(self, serves: bool) -> None:
        """A router may join while the worker leaves."""
        self._serves(serves and self._parts is not None)

    async def _until_empty(self, core: WorkerCore, deadline_s: float) -> None:
        while not core.empty and self._thread.is_alive():
            now_s = time.monotonic()
            if core.draining and core.idle:
                deadline_s = min(deadline_s, now_s + STORE_S)
            if now_s >= deadline_s:
                return
            await asyncio.sleep(0.02)

    async def _take_state(self, request: pb.SetStateRequest) -> pb.SetStateResponse:
        """What it is from now on, as all routers hear with the same turn of the loop."""
        answer: Future[pb.SetStateResponse] = Future()
        parts = self._parts
        if parts is None:
            return pb.SetStateResponse(role=self._settings.role)
        core = parts.loop.core

        def take() -> None:
            if request.HasField("role"):
                core.take_role(Role(request.role))
                log.info("its role is %s", core.role)
            answer.set_result(pb.SetStateResponse(role=core.role, role_epoch=core.role_epoch))

        self._inbox.put(RunOnLoop(take))
        if request.HasField("drain_s") and self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(request.drain_s))
        return await asyncio.wrap_future(answer)

    async def answer(self) -> None:
        """Returns once the loop has come round: nothing hangs."""
        turned: Future[None] = Future()
        self._inbox.put(RunOnLoop(lambda: turned.set_result(None)))
        await asyncio.wrap_future(turned)

    async def wait_closed(self) -> None:
        """Returns once stopped; raises what the worker died of."""
        await asyncio.shield(asyncio.wrap_future(self._closed))

    async def _log_activity(self, parts: WorkerParts) -> None:
        """The loop reads its own counters, between two events."""
        activity = ActivityLog(parts.hello.total_blocks)

        def tell() -> None:
            counters = parts.loop.core.counters(parts.links.states())
            line = activity.line(counters, time.monotonic())
            if line is not None:
                log.info("%s", line)

        while True:
            self._inbox.put(RunOnLoop(tell))
            await asyncio.sleep(PERIOD_S)

    # --- loop thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            parts = run_apart(self._build)
        except BaseException as error:
            self._started.set_exception(error)
            self._closed.set_result(None)
            return
        self._started.set_result(parts)
        use_threads(1)  # the device's thread has the cores
        try:
            parts.loop.run()
            self._closed.set_result(None)
        except BaseException as error:
            if self._words is not None:
                self._words.crashed(error, key_of(parts.loop.handled))
            log.exception("worker %s died", self._settings.name)
            self._closed.set_exception(error)
        finally:
            parts.close()

    def _build(self) -> WorkerParts:
        self._now_does(StartActivity(stage=Stage.CHOOSES))
        settings, self.chosen = settle(self._settings)
        find = partial(open_with_peers, settings, self._own, self._routers)
        return build_worker(settings, self._inbox, self._now_does, self._words, find)

    def _now_does(self, activity: StartActivity) -> None:
        self.activity = activity
        self._ledger.enter(PHASE_OF[activity.stage], time.monotonic())

    def _report(self) -> pb.DebugKvResponse:
        """Taken by the loop between two events, so it is consistent."""
        answer: Future[pb.DebugKvResponse] = Future()
        parts = self._parts
        if parts is None:
            return pb.DebugKvResponse(worker=self._settings.name)

        def take() -> None:
            answer.set_result(kv_report(parts.hello, parts.loop.core, time.monotonic()))

        self._inbox.put(RunOnLoop(take))
        return answer.result(timeout=30)
