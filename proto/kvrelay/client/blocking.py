"""The client for programs with threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TypeVar, Unpack

import grpc

from kvrelay.access.tls import blocking_channel
from kvrelay.access.values import Tls
from kvrelay.client.going_on import SoFar
from kvrelay.client.options import GenerateOptions, with_options
from kvrelay.client.parts import Parts, TextOrIds
from kvrelay.client.requests import (
    Prompt,
    chunk_of,
    generate_request,
    generated_of,
    ledger_of,
    model_info_of,
    renew,
    retries_of,
    server_info_of,
)
from kvrelay.client.routers import (
    CHANNEL_OPTIONS,
    Routers,
    Tour,
    addresses_of,
    api_key_of,
    is_gone,
    with_key,
)
from kvrelay.errors import KvrelayError
from kvrelay.results import Chunk, Generated, ModelInfo, ServerInfo
from kvrelay.status import meant_by, raise_for
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1.inference_pb2_grpc import InferenceStub

_Response = TypeVar("_Response")


class Stream:
    """The chunks of one request. Closing it, or leaving its `with` block, stops the work."""

    def __init__(
        self,
        tour: Tour[InferenceStub],
        request: pb.GenerateRequest,
        timeout_s: float | None,
        retries: int = 0,
    ) -> None:
        self.request_id = request.request_id
        self._tour = tour
        self._request = request
        self._timeout_s = timeout_s
        self._retries = retries_of(request, retries, time.monotonic())
        self._closed = threading.Event()
        self._so_far = SoFar(routers=tour.routers)
        self._call = self._begin()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        """Raises Refused, InvalidRequest, ModelNotFound or RequestFailedError."""
        while True:
            try:
                response = next(self._call)
            except grpc.RpcError as error:
                if self._so_far.is_whole(self._request):
                    raise StopIteration from None
                self._call_again(error)
                continue
            self._so_far.add(response)
            return chunk_of(response)

    def _call_again(self, error: grpc.RpcError) -> None:
        """Sends the request again: at the time that the refusal names, or to the next router,
        behind what was delivered. Otherwise raises the error's meaning."""
        meant = meant_by(error)
        delay_s = self._delay_s(meant)
        if delay_s is None or self._closed.wait(delay_s):
            raise meant from error
        renew(self._request, self._retries, meant, time.monotonic())
        self._call = self._begin()

    def _begin(self) -> grpc.CallIterator[pb.GenerateResponse]:
        has_begun = self._so_far.has_begun
        self._request.can_go_on = self._tour.can_go_on(has_begun=has_begun)
        return self._send()

    def _send(self) -> grpc.CallIterator[pb.GenerateResponse]:
        return self._tour.stub.Generate(self._request, timeout=self._timeout_s)

    def _delay_s(self, error: KvrelayError) -> float | None:
        asked = self._tour, self._retries, self._request
        return self._so_far.try_again(*asked, error, time.monotonic())

    @property
    def ledger_ms(self) -> dict[str, float]:
        """Filled after the last chunk, if `ledger` was asked for; else empty."""
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


class InputStream(Stream):
    """A stream whose prompt arrives in parts: all of them, or those so far, are sent again to the
    next router."""

    def __init__(
        self,
        tour: Tour[InferenceStub],
        request: pb.GenerateRequest,
        parts: Parts,
        timeout_s: float | None,
        retries: int,
    ) -> None:
        self._parts = parts
        super().__init__(tour, request, timeout_s, retries)

    def _send(self) -> grpc.CallIterator[pb.GenerateResponse]:
        if self._parts.is_whole:
            self._parts.complete(self._request)
            return super()._send()
        self._parts.renew(self._request)
        return self._tour.stub.GenerateStream(iter(self._parts), timeout=self._timeout_s)

    def _call_again(self, error: grpc.RpcError) -> None:
        if self._parts.error is not None:
            raise self._parts.error from None
        super()._call_again(error)


class Client:
    """Talks to a cluster's gRPC port. Safe to share between threads."""

    def __init__(
        self,
        address: str | Sequence[str] = "localhost:50051",
        *,
        timeout_s: float | None = None,
        tls: Tls | None = None,
        api_key: str | None = None,
    ) -> None:
        """`address`: HOST:PORT of a router, or several: the first is used until it is gone, then
        the next. `timeout_s`: limit for any one call; None for no limit. `tls`: how the routers'
        certificates are checked; None: no TLS. `api_key`: goes with every call; None: the
        environment's KVRELAY_API_KEY, if there is one. Raises ConfigError for a file that can't be
        read."""
        self._channels = [
            blocking_channel(one, tls, CHANNEL_OPTIONS) for one in addresses_of(address)
        ]
        key = api_key_of(api_key)
        self._routers = Routers(
            [with_key(InferenceStub(channel), key) for channel in self._channels]
        )
        self._timeout_s = timeout_s

    @with_options
    def stream(
        self, prompt: Prompt, *, retries: int = 0, **options: Unpack[GenerateOptions]
    ) -> Stream:
        """The answer to a text, to token ids or to a chat, as it comes. Iterate it once."""
        return Stream(
            self._routers.tour(), generate_request(prompt, options), self._timeout_s, retries
        )

    @with_options
    def generate(
        self, prompt: Prompt, *, retries: int = 0, **options: Unpack[GenerateOptions]
    ) -> Generated:
        """The whole answer to a text, to token ids or to a chat.

        Raises Refused, InvalidRequest, ModelNotFound or RequestFailedError.
        """
        with self.stream(prompt, retries=retries, **options) as stream:
            chunks = list(stream)
            return generated_of(chunks, stream.ledger_ms)

    @with_options
    def stream_input(
        self,
        parts: Iterable[TextOrIds],
        *,
        expected_tokens: int = 0,
        retries: int = 0,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """The answer to a prompt that comes in parts, all of them text or all token ids. What has
        come is computed while the rest is on its way; the prompt ends where `parts` end.

        `expected_tokens`: a prompt so long that it could never be served is refused at once.
        """
        request = generate_request("", options)
        request.ClearField("input")
        return InputStream(
            self._routers.tour(),
            request,
            Parts(request, parts, expected_tokens),
            self._timeout_s,
            retries,
        )

    def abort(self, *request_ids: str) -> None:
        """Aborts at every reachable router. Unknown ids are ignored."""
        request = pb.AbortRequest(request_ids=request_ids)
        for stub in self._routers.stubs:
            try:
                stub.Abort(request, timeout=self._timeout_s)
            except grpc.RpcError as error:
                if len(self._channels) == 1 or not is_gone(meant_by(error)):
                    raise_for(error)

    def model_info(self) -> ModelInfo:
        request = pb.GetModelInfoRequest()
        return model_info_of(self._unary(lambda stub: stub.GetModelInfo, request))

    def server_info(self) -> ServerInfo:
        """From the router that the client is using."""
        request = pb.GetServerInfoRequest()
        return server_info_of(self._unary(lambda stub: stub.GetServerInfo, request))

    def _unary(
        self, method: Callable[[InferenceStub], Callable[..., _Response]], request: object
    ) -> _Response:
        tour = self._routers.tour()
        while True:
            try:
                return method(tour.stub)(request, timeout=self._timeout_s)
            except grpc.RpcError as error:
                if not tour.try_next(meant := meant_by(error)):
                    raise meant from error

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
