"""The client for programs with threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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
from kvrelay.results import Chunk, Generated, ModelInfo, ServerInfo
from kvrelay.status import meant_by, raise_for
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1.inference_pb2_grpc import InferenceStub

Response = TypeVar("Response")


class Stream:
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
        self._closed = threading.Event()
        self._call = stub.Generate(request, timeout=timeout_s)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        """Raises Refused, InvalidRequest, ModelNotFound or RequestFailedError."""
        while True:
            try:
                return chunk_of(next(self._call))
            except grpc.RpcError as error:
                self._call_again(error)

    def _call_again(self, error: grpc.RpcError) -> None:
        """At the time that the refusal names. Raises what the error stands for, if not."""
        meant = meant_by(error)
        delay_s = self._retries.delay_s(meant, time.monotonic())
        if delay_s is None or self._closed.wait(delay_s):
            raise meant from error
        renew_deadline(self._request, self._retries, time.monotonic())
        self._call = self._stub.Generate(self._request, timeout=self._timeout_s)

    @property
    def ledger_ms(self) -> dict[str, float]:
        """Only after the last chunk, and if `ledger` was asked for; else empty."""
        return ledger_of(self._call.trailing_metadata()) if not self._call.is_active() else {}

    def close(self) -> None:
        self._closed.set()
        self._call.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Client:
    """Talks to a cluster's gRPC port. Safe to share between threads."""

    def __init__(self, address: str = "localhost:50051", *, timeout_s: float | None = None) -> None:
        """`timeout_s`: the longest that any one call may take; None for no limit."""
        self._channel = grpc.insecure_channel(address)
        self._stub = InferenceStub(self._channel)
        self._timeout_s = timeout_s

    def stream(
        self, prompt: Prompt, *, retries: int = 0, **options: Unpack[GenerateOptions]
    ) -> Stream:
        """Refused, it comes back up to `retries` times, each at the time that the refusal names."""
        return Stream(self._stub, generate_request(prompt, options), self._timeout_s, retries)

    def generate(
        self, prompt: Prompt, *, retries: int = 0, **options: Unpack[GenerateOptions]
    ) -> Generated:
        """As `stream`. Raises Refused, InvalidRequest, ModelNotFound or RequestFailedError."""
        with self.stream(prompt, retries=retries, **options) as stream:
            chunks = list(stream)
            return generated_of(chunks, stream.ledger_ms)

    def abort(self, *request_ids: str) -> None:
        """Unknown ids are ignored."""
        self._unary(self._stub.Abort, pb.AbortRequest(request_ids=request_ids))

    def model_info(self) -> ModelInfo:
        return model_info_of(self._unary(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    def server_info(self) -> ServerInfo:
        return server_info_of(self._unary(self._stub.GetServerInfo, pb.GetServerInfoRequest()))

    def _unary(self, call: Callable[..., Response], request: object) -> Response:
        try:
            return call(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise_for(error)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
