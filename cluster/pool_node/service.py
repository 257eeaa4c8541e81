"""A pool node's gRPC API: routers ask for reports and receive changes of its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count

import grpc

from kvpool.core.node.events import RouterCall, RouterHungUp, RouterTook
from kvrelay.messages import PoolUpdate
from kvrelay.types import WIRE_VERSION
from kvrelay.v1 import pool_node_pb2 as pb
from kvrelay.v1 import pool_node_pb2_grpc
from kvrelay.wire import encode_update


@dataclass(frozen=True, slots=True)
class ReportAsked:
    answer: Future[pb.PoolReport]


class RouterLine:
    """One router's stream, as the loop uses it. `tell` and `drop` may be called from any thread."""

    def __init__(self, call: RouterCall) -> None:
        self.call = call
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[pb.PoolUpdate | str] = asyncio.Queue()

    def tell(self, update: PoolUpdate) -> None:
        self._loop.call_soon_threadsafe(self._messages.put_nowait, encode_update(update))

    def drop(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._messages.put_nowait, reason)

    async def next(self) -> pb.PoolUpdate | str:
        """The next update, or the reason why the stream ends."""
        return await self._messages.get()


@dataclass(frozen=True, slots=True)
class LineOpened:
    """A router has connected and is ready for its first message."""

    line: RouterLine


ServiceEvent = ReportAsked | LineOpened | RouterTook | RouterHungUp


class PoolNodeService(pool_node_pb2_grpc.PoolNodeServicer):
    """`post` puts the routers' calls into the loop's inbox."""

    def __init__(self, post: Callable[[ServiceEvent], None]) -> None:
        self._post = post
        self._calls = count()

    async def Report(  # noqa: N802
        self, request: pb.PoolReportRequest, context: grpc.aio.ServicerContext
    ) -> pb.PoolReport:
        """The loop answers it between two events."""
        answer: Future[pb.PoolReport] = Future()
        self._post(ReportAsked(answer))
        return await asyncio.wrap_future(answer)

    async def Watch(  # noqa: N802
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.PoolUpdate]:
        """One message at a time: gRPC takes the next one when the router reads."""
        if request.wire_version != WIRE_VERSION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this pool node speaks wire version {WIRE_VERSION}, the router "
                f"{request.wire_version}: install the same kvrelay on both",
            )
        line = RouterLine(RouterCall(next(self._calls)))
        self._post(LineOpened(line))
        try:
            while isinstance(message := await line.next(), pb.PoolUpdate):
                yield message
                self._post(RouterTook(router=line.call))
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        finally:
            self._post(RouterHungUp(router=line.call))
