"""One worker as the router reaches it: an Attach stream that is opened again when it breaks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Protocol

import grpc

from kvrelay.errors import PeerError
from kvrelay.from_worker_wire import decode_event, decode_hello
from kvrelay.messages import BlockChanges, Counters, ToWorker, WorkerEvent, WorkerHello
from kvrelay.report_wire import decode_changes, decode_counters
from kvrelay.to_worker_wire import encode_to_worker
from kvrelay.types import WIRE_VERSION, Incarnation
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 5.0
REFUSAL_S = 5.0
MESSAGE_BYTES = 64 * 1024 * 1024
PING_MS, PATIENCE_MS = 5_000, 10_000
"""A worker that answers no ping for so long is gone, with its host, or hangs: it is lost. (gRPC's
keepalive_timeout_ms doesn't bound this wait, ping_timeout_ms does.)"""


class LinkOwner(Protocol):
    """Called in the event loop."""

    def joined(self, link: WorkerLink, hello: WorkerHello) -> None:
        """Raises PeerError to refuse the worker for good."""

    def said(
        self,
        worker: Incarnation,
        events: tuple[WorkerEvent, ...],
        counters: Counters,
        blocks: tuple[BlockChanges, ...],
    ) -> None: ...

    def lost(self, worker: Incarnation, reason: str) -> None: ...


class WorkerLink:
    def __init__(self, address: str, router: Incarnation, owner: LinkOwner) -> None:
        self.address = address
        self.hello: WorkerHello | None = None
        self._router = router
        self._owner = owner
        self._outgoing: asyncio.Queue[pb.ToWorker | None] = asyncio.Queue()
        self._channel = grpc.aio.insecure_channel(address, options=_options())
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)
        self._task = asyncio.ensure_future(self._run())

    def send(self, message: ToWorker) -> None:
        """Queued; lost with the stream, as `lost` then tells."""
        self._outgoing.put_nowait(encode_to_worker(message))

    async def debug_kv(self) -> pb.DebugKvResponse:
        return await self._stub.DebugKv(pb.DebugKvRequest(), timeout=30)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    async def _run(self) -> None:
        """Attach again and again, more and more slowly while it fails."""
        retry_s = FIRST_RETRY_S
        while True:
            try:
                await self._attach()
                reason = "it closed the stream"
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
            except PeerError as error:
                log.error("worker at %s refused: %s", self.address, error)
                return
            finally:
                was_attached = self._detached("the link was closed")
            retry_s = FIRST_RETRY_S if was_attached else min(2 * retry_s, LAST_RETRY_S)
            log.debug("worker at %s: %s; trying again", self.address, reason)
            await asyncio.sleep(retry_s)

    async def _attach(self) -> None:
        outgoing: asyncio.Queue[pb.ToWorker | None] = asyncio.Queue()
        self._outgoing = outgoing
        stream = self._stub.Attach(self._requests(outgoing))
        try:
            async for batch in stream:
                if batch.HasField("hello"):
                    hello = decode_hello(batch.hello)
                    await self._joined(hello, stream)
                    self.hello = hello
                elif self.hello is not None:
                    self._said(self.hello.incarnation, batch)
        finally:
            stream.cancel()
            outgoing.put_nowait(None)

    async def _joined(self, hello: WorkerHello, stream: AsyncIterator[pb.FromWorker]) -> None:
        """Raises PeerError, which the worker is told first."""
        try:
            self._owner.joined(self, hello)
        except PeerError as error:
            self._outgoing.put_nowait(pb.ToWorker(refused=pb.RouterRefused(reason=str(error))))
            self._outgoing.put_nowait(None)
            with suppress(TimeoutError):
                await asyncio.wait_for(_end_of(stream), REFUSAL_S)
            raise

    def _said(self, worker: Incarnation, batch: pb.FromWorker) -> None:
        now_s = time.monotonic()
        events = tuple(decode_event(event, now_s) for event in batch.events)
        blocks = tuple(decode_changes(batch))
        self._owner.said(worker, events, decode_counters(batch.counters), blocks)

    def _detached(self, reason: str) -> bool:
        """Whether there was a worker to lose."""
        hello, self.hello = self.hello, None
        if hello is not None:
            self._owner.lost(hello.incarnation, reason)
        return hello is not None

    async def _requests(
        self, outgoing: asyncio.Queue[pb.ToWorker | None]
    ) -> AsyncIterator[pb.ToWorker]:
        hello = pb.RouterHello(wire_version=WIRE_VERSION, router_incarnation=self._router)
        yield pb.ToWorker(hello=hello)
        while (message := await outgoing.get()) is not None:
            yield message


async def _end_of(stream: AsyncIterator[pb.FromWorker]) -> None:
    async for _ in stream:
        pass


def _options() -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", PING_MS),
        ("grpc.http2.ping_timeout_ms", PATIENCE_MS),
    ]
