"""The router's link to one worker: an Attach stream that is opened again when it breaks, also when
the router's core rejects a message."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import grpc

from kvrelay.access.tls import LastingChannel
from kvrelay.access.values import NO_ACCESS, Access
from kvrelay.counters import Counters
from kvrelay.errors import PeerError
from kvrelay.messages import BlockChanges, ToWorker, WorkerEvent, WorkerHello
from kvrelay.types import WIRE_VERSION, Incarnation
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc
from kvrelay.wire import (
    decode_changes,
    decode_counters,
    decode_event,
    decode_hello,
    encode_to_worker,
)

log = logging.getLogger(__name__)

NOT_LET_IN = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION)
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 5.0
REFUSAL_S = 5.0
STATE_S = 25.0
"""Less than a caller waits for the router's answer."""
MESSAGE_BYTES = 64 * 1024 * 1024
PING_MS, PATIENCE_MS = 5_000, 10_000
"""A worker that answers no ping for this long is gone or hangs: it is lost. (gRPC's
keepalive_timeout_ms doesn't bound this wait, ping_timeout_ms does.)"""


@dataclass(frozen=True, slots=True)
class _Ended:
    """Why a stream ended. `fault`: because of the worker's message."""

    reason: str
    fault: bool = False


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

    def lost(self, worker: Incarnation, reason: str, *, was_rejected: bool = False) -> None: ...


class WorkerLink:
    def __init__(
        self, address: str, router: Incarnation, owner: LinkOwner, access: Access = NO_ACCESS
    ) -> None:
        """Raises ConfigError when a file of `access` can't be read."""
        self.address = address
        self.hello: WorkerHello | None = None
        self.refusal = ""  # why the worker is refused for good
        self.trouble = ""  # why the worker does not let this router in
        self._attaching: asyncio.Task[None] | None = None
        self._hung_up = False
        self._router = router
        self._owner = owner
        self._outgoing: asyncio.Queue[pb.ToWorker | None] = asyncio.Queue()
        self._access = access
        self._channel = LastingChannel(address, access.dials, channel_options())
        self._task = asyncio.ensure_future(self._run())

    def send(self, message: ToWorker) -> None:
        """Queued; lost with the stream, which `lost` then reports."""
        self._outgoing.put_nowait(encode_to_worker(message))

    def hang_up(self) -> None:
        """Closes the stream of a worker that is silent, and attaches again."""
        if self._attaching is not None:
            self._hung_up = True
            self._attaching.cancel()

    async def debug_kv(self) -> pb.DebugKvResponse:
        metadata = self._access.metadata
        stub = worker_pb2_grpc.WorkerStub(self._channel.latest())
        return await stub.DebugKv(pb.DebugKvRequest(), timeout=30, metadata=metadata)

    async def set_state(self, request: pb.SetStateRequest) -> pb.SetStateResponse:
        """Raises LookupError where the worker doesn't answer: it hangs, or is gone."""
        metadata = self._access.metadata
        stub = worker_pb2_grpc.WorkerStub(self._channel.latest())
        try:
            return await stub.SetState(request, timeout=STATE_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            told = f"{self.address} does not answer: {error.details()}"
            raise LookupError(f"the worker at {told}") from None

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    async def _run(self) -> None:
        """Attaches again and again, at growing intervals while it fails."""
        retry_s = FIRST_RETRY_S
        while not self.refusal:
            ended = _Ended("the link was closed")
            try:
                ended = await self._attach_once()
            finally:
                was_attached = self._detached(ended)
            well = was_attached and not ended.fault
            retry_s = FIRST_RETRY_S if well else min(2 * retry_s, LAST_RETRY_S)
            log.debug("worker at %s: %s; trying again", self.address, ended.reason)
            await asyncio.sleep(retry_s)

    async def _attach_once(self) -> _Ended:
        """Returns when the stream ends, for whatever reason."""
        self._hung_up = False
        self._attaching = asyncio.ensure_future(self._attach())
        try:
            await self._attaching
        except asyncio.CancelledError:
            if not self._hung_up:
                raise
            return _Ended("it was silent")
        except grpc.aio.AioRpcError as error:
            return self._broke(error)
        except PeerError as error:
            if self.hello is None:
                self.refusal = str(error)
                log.error("worker at %s refused: %s", self.address, error)
            return self._fault(error)
        except Exception as error:
            return self._fault(error)
        return _Ended("it closed the stream")

    def _broke(self, error: grpc.aio.AioRpcError) -> _Ended:
        """Says once that the worker doesn't take this router's token, or its version."""
        reason = error.details() or error.code().name
        if error.code() in NOT_LET_IN and reason != self.trouble:
            log.error("worker at %s does not let this router in: %s", self.address, reason)
            self.trouble = reason
        return _Ended(reason)

    def _fault(self, error: Exception) -> _Ended:
        """A message of the worker can't be accepted: a bug, on one of the two sides."""
        if not self.refusal:
            text = "worker at %s: its message was rejected, so its link is closed and opened again"
            log.error(text, self.address, exc_info=error)
        return _Ended(f"its message was rejected: {error!r}", fault=True)

    async def _attach(self) -> None:
        outgoing: asyncio.Queue[pb.ToWorker | None] = asyncio.Queue()
        self._outgoing = outgoing
        stub = worker_pb2_grpc.WorkerStub(self._channel.latest())
        stream = stub.Attach(self._requests(outgoing), metadata=self._access.metadata)
        try:
            async for batch in stream:
                if batch.HasField("hello"):
                    await self._joined(decode_hello(batch.hello), stream)
                elif self.hello is not None:
                    self._said(self.hello.incarnation, batch)
        finally:
            stream.cancel()
            outgoing.put_nowait(None)

    async def _joined(self, hello: WorkerHello, stream: AsyncIterator[pb.FromWorker]) -> None:
        """Raises PeerError, after the worker was told."""
        self.hello = hello
        try:
            self._owner.joined(self, hello)
        except PeerError as error:
            self.hello = None
            self._outgoing.put_nowait(pb.ToWorker(refused=pb.RouterRefused(reason=str(error))))
            self._outgoing.put_nowait(None)
            with suppress(TimeoutError):
                await asyncio.wait_for(_end_of(stream), REFUSAL_S)
            raise

    def _said(self, worker: Incarnation, batch: pb.FromWorker) -> None:
        now_s = time.monotonic()
        events = tuple(decode_event(event, now_s) for event in batch.events)
        blocks = decode_changes(batch.blocks)
        self._owner.said(worker, events, decode_counters(batch.counters), blocks)

    def _detached(self, ended: _Ended) -> bool:
        """True if there was a worker to lose."""
        hello, self.hello = self.hello, None
        if hello is None:
            return False
        try:
            self._owner.lost(hello.incarnation, ended.reason, was_rejected=ended.fault)
        except Exception:
            log.exception("worker at %s: its loss was not handled well", self.address)
        return True

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


def channel_options() -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", PING_MS),
        ("grpc.http2.ping_timeout_ms", PATIENCE_MS),
    ]
