"""The client for programs with an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar, Unpack

import grpc

from kvrelay.codec import (
    GenerateOptions,
    Prompt,
    chunk_of,
    generate_request,
    generated_of,
    ledger_of,
    model_info_of,
    renew_deadline,
    retries_of,
    server_info_of,
)
from kvrelay.errors import RequestFailedError
from kvrelay.results import Chunk, Generated, ModelInfo, ServerInfo
from kvrelay.status import meant_by, raise_for
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1.inference_pb2_grpc import InferenceStub

Response = TypeVar("Response")


class AsyncStream:
    """One request's chunks. Closing it, or leaving its `with` block, stops the work."""

    def __init__(
        self,
        stub: InferenceStub,
        request: pb.GenerateRequest,
        timeout_s: float | None,
        retries: int = 0,
    ) -> None:
        self.request_id = request.request_id
        self._stub = stub
        self._request = request
        self._timeout_s = timeout_s
        self._retries = retries_of(request, retries, time.monotonic())
        self._call = stub.Generate(request, timeout=timeout_s)
        self._chunks = aiter(self._call)
        self._closed = False

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Chunk:
        """Raises Refused, InvalidRequest, ModelNotFound or RequestFailedError."""
        try:
            return await self._next()
        except asyncio.CancelledError:
            if self._closed:
                raise RequestFailedError("cancelled", "this stream was closed") from None
            raise

    async def _next(self) -> Chunk:
        while True:
            try:
                return chunk_of(await anext(self._chunks))
            except grpc.RpcError as error:
                await self._call_again(error)

    async def _call_again(self, error: grpc.RpcError) -> None:
        """At the time that the refusal names. Raises what the error stands for, if not."""
        meant = meant_by(error)
        delay_s = self._retries.delay_s(meant, time.monotonic())
        if delay_s is None:
            raise meant from error
        await asyncio.sleep(delay_s)
        if self._closed:
            raise meant from error
        renew_deadline(self._request, self._retries, time.monotonic())
        self._call = self._stub.Generate(self._request, timeout=self._timeout_s)
        self._chunks = aiter(self._call)

    async def ledger_ms(self) -> dict[str, float]:
        """After the last chunk, and if `ledger` was asked for; else empty."""
        return ledger_of(await self._call.trailing_metadata()) if self._call.done() else {}

    def close(self) -> None:
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """Talks to a cluster's gRPC port. Belongs to the event loop that it is used in."""

    def __init__(self, address: str = "localhost:50051", *, timeout_s: float | None = None) -> None:
        """`timeout_s`: the longest that any one call may take; None for no limit."""
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = InferenceStub(self._channel)
        self._timeout_s = timeout_s

    def stream(
        self, prompt: Prompt, *, retries: int = 0, **options: Unpack[GenerateOptions]
    ) -> AsyncStream:
        """Refused, it comes back up to `retries` times, each at the time that the refusal names."""
        return AsyncStream(self._stub, generate_request(prompt, options), self._timeout_s, retries)

    async def generate(
        self, prompt: Prompt, *, retries: int = 0, **options: Unpack[GenerateOptions]
    ) -> Generated:
        """As `stream`. Raises Refused, InvalidRequest, ModelNotFound or RequestFailedError."""
        async with self.stream(prompt, retries=retries, **options) as stream:
            chunks = [chunk async for chunk in stream]
            return generated_of(chunks, await stream.ledger_ms())

    async def abort(self, *request_ids: str) -> None:
        """Unknown ids are ignored."""
        await self._unary(self._stub.Abort, pb.AbortRequest(request_ids=request_ids))

    async def model_info(self) -> ModelInfo:
        return model_info_of(await self._unary(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    async def server_info(self) -> ServerInfo:
        return server_info_of(
            await self._unary(self._stub.GetServerInfo, pb.GetServerInfoRequest())
        )

    async def _unary(self, call: Callable[..., Awaitable[Response]], request: object) -> Response:
        try:
            return await call(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise_for(error)

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
