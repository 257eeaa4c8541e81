"""A worker's gRPC face: one Attach stream per router, and the view of every held block."""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from cluster.worker.events import FromRouter, Incoming, RouterJoined, RouterLost
from kvrelay.errors import PeerError
from kvrelay.from_worker_wire import encode_hello
from kvrelay.messages import BlockChanges, Counters, WorkerEvent, WorkerHello
from kvrelay.report_wire import encode_batch
from kvrelay.to_worker_wire import decode_to_worker
from kvrelay.types import WIRE_VERSION
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc

log = logging.getLogger(__name__)


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
    """`report` answers DebugKv; it may be called from any thread."""

    def __init__(
        self,
        hello: WorkerHello,
        inbox: queue.SimpleQueue[Incoming],
        report: Callable[[], pb.DebugKvResponse],
    ) -> None:
        self._hello = hello
        self._inbox = inbox
        self._report = report

    async def Attach(  # noqa: N802
        self, requests: AsyncIterator[pb.ToWorker], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FromWorker]:
        await self._greet(requests, context)
        stream = GrpcRouterStream()
        self._inbox.put(RouterJoined(stream))
        reader = asyncio.ensure_future(self._read(stream, requests))
        try:
            yield pb.FromWorker(hello=encode_hello(self._hello))
            async for batch in stream.batches():
                yield batch
        finally:
            reader.cancel()
            self._inbox.put(RouterLost(stream))

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
