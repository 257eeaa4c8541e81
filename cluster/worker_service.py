"""A worker's gRPC face: one Attach stream per router, and the view of every held block."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from cluster.worker_loop import FromRouter, Incoming, RouterJoined, RouterLost
from kvrelay.errors import PeerError
from kvrelay.messages import Counters, WorkerEvent, WorkerHello
from kvrelay.types import WIRE_VERSION
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc
from kvrelay.wire import decode_to_worker, encode_batch, encode_hello


class GrpcRouterStream:
    """The loop's side of one router's stream: encodes on the caller's thread, sends on ours."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._batches: asyncio.Queue[pb.FromWorker] = asyncio.Queue()

    def send(self, events: Sequence[WorkerEvent], counters: Counters) -> None:
        batch = encode_batch(events, counters, time.monotonic())
        self._loop.call_soon_threadsafe(self._batches.put_nowait, batch)

    async def next(self) -> pb.FromWorker:
        return await self._batches.get()


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
            while (batch := await self._next(stream, reader)) is not None:
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
        async for message in requests:
            self._inbox.put(FromRouter(stream, decode_to_worker(message)))

    @staticmethod
    async def _next(stream: GrpcRouterStream, reader: asyncio.Future[None]) -> pb.FromWorker | None:
        """None when the router has closed its side; raises what it could not read."""
        waiting = asyncio.ensure_future(stream.next())
        await asyncio.wait([waiting, reader], return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        if (error := reader.exception()) is not None:
            raise PeerError(str(error)) from error
        return None

    async def DebugKv(  # noqa: N802
        self, request: pb.DebugKvRequest, context: grpc.aio.ServicerContext
    ) -> pb.DebugKvResponse:
        return await asyncio.to_thread(self._report)
