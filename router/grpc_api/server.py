"""The gRPC servers of a router: kvrelay.v1.Inference for clients, kvrelay.v1.Admin for operators,
both with the standard health and reflection services."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvrelay.access.token import TokenCheck
from kvrelay.errors import InvalidRequest, PeerError, Refused
from kvrelay.status import LEDGER_KEY
from kvrelay.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc, worker_pb2
from kvrelay.v1 import inference_pb2 as pb
from router.access.caller import Caller
from router.arriving.prompt import Arriving, start_arriving
from router.core.state.generation import Dispatcher
from router.core.state.story import unknown
from router.grpc_api.changes import Changes, answered
from router.grpc_api.errors import abort_with
from router.grpc_api.messages import (
    continuation_of,
    first_part,
    objectives_in,
    parts_of,
    prompt_of,
    prompt_told,
    response_of,
    sampling_of,
)
from router.grpc_api.movable import MovableStreams
from router.grpc_api.watches import Watches
from router.live.watching import quarantined_pair, worker_info
from router.text.bounds import MAX_ABORTED, check_count
from router.text.generation import TextGeneration
from router.text.request import PromptInput, TextRequest
from router.text.service import TextService

ADMIN_NAME = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
REGISTRY_NAME = worker_pb2.DESCRIPTOR.services_by_name["Registry"].full_name
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name
STANDARD_NAMES = (health.SERVICE_NAME, reflection.SERVICE_NAME)


class InferenceApi(inference_pb2_grpc.InferenceServicer):
    def __init__(
        self,
        service: TextService,
        movable: MovableStreams,
        *,
        version: str,
        cluster: str,
        most_characters: int,
    ) -> None:
        """`most_characters`: of a prompt that arrives in parts."""
        self._service = service
        self._movable = movable
        self._most_characters = most_characters
        self._version = version
        self._cluster = cluster
        self._started_s = time.monotonic()

    @property
    def dispatcher(self) -> Dispatcher:
        return self._service.dispatcher

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        received_s = time.perf_counter()
        try:
            caller = self._caller(context)
            asked = self._text_request(request, prompt_of(request), caller, context, received_s)
            generation = await self._service.start(asked)
            async with aclosing(self._answer(request, generation)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await abort_with(context, error, request.request_id or None)
        if request.ledger:
            _tell_ledger(context, generation)

    async def GenerateStream(  # noqa: N802
        self, parts: AsyncIterator[pb.PromptPart], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        request = pb.GenerateRequest()
        try:
            caller = self._caller(context)
            first = await first_part(parts)
            request = first.request
            asked = self._text_request(request, "", caller, context, time.perf_counter())
            generation = await start_arriving(
                self._service,
                Arriving(
                    request=asked,
                    parts=parts_of(first, parts),
                    most_characters=self._most_characters,
                    expected_tokens=first.expected_tokens,
                ),
            )
            async with aclosing(self._answer(request, generation)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await abort_with(context, error, request.request_id or None)
        if request.ledger:
            _tell_ledger(context, generation)

    async def _answer(
        self, request: pb.GenerateRequest, generation: TextGeneration
    ) -> AsyncGenerator[pb.GenerateResponse]:
        with self._movable.running(generation, can_go_on=request.can_go_on):
            async with aclosing(_responses(generation)) as responses:
                async for response in responses:
                    yield response

    def _caller(self, context: grpc.aio.ServicerContext) -> Caller:
        """Raises NotAuthenticated."""
        return self._service.caller_of(_metadata(context))

    def _text_request(
        self,
        request: pb.GenerateRequest,
        prompt: PromptInput,
        caller: Caller,
        context: grpc.aio.ServicerContext,
        received_s: float,
    ) -> TextRequest:
        """Raises InvalidRequest."""
        return TextRequest(
            request_id=request.request_id or f"gen-{uuid.uuid4().hex}",
            prompt=prompt,
            sampling=sampling_of(request.sampling_params),
            continuation=continuation_of(request),
            promise=request.promise,
            model=request.model,
            caller=caller,
            tenant=caller.space(request.tenant),
            tier=self._service.tier_of(request.tier, _metadata(context), caller),
            objectives=objectives_in(request.slo, context.time_remaining()),
            received_s=received_s,
        )

    async def Abort(  # noqa: N802
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortResponse:
        try:
            caller = self._caller(context)
            check_count("request_ids", len(request.request_ids), MAX_ABORTED, "ids")
        except Exception as error:
            await abort_with(context, error)
        for request_id in request.request_ids:
            self._service.dispatcher.abort(caller.own_id(request_id))
        return pb.AbortResponse()

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        try:
            self._caller(context)
            facts = self._service.facts()
        except Exception as error:
            await abort_with(context, error)
        return pb.GetModelInfoResponse(
            model=self._service.model_name,
            architecture=facts.architecture,
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            eos_token_ids=self._service.defaults.eos_token_ids,
            fingerprint=facts.fingerprint,
        )

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        try:
            self._caller(context)
        except Exception as error:
            await abort_with(context, error)
        dispatcher = self._service.dispatcher
        return pb.GetServerInfoResponse(
            version=self._version,
            cluster=self._cluster,
            uptime_s=time.monotonic() - self._started_s,
            ready=dispatcher.ready(),
            running_requests=dispatcher.running_requests(),
            workers=[worker_info(worker) for worker in dispatcher.workers()],
            quarantined=[quarantined_pair(pair) for pair in dispatcher.quarantined()],
        )

    def watch_report(self) -> admin_pb2.WatchReport:
        report = self._service.dispatcher.watch_report()
        report.cluster, report.version = self._cluster, self._version
        report.uptime_s = time.monotonic() - self._started_s
        report.leaving = self._service.leaving
        return report


def _metadata(context: grpc.aio.ServicerContext) -> dict[str, str]:
    return {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}


async def _responses(generation: TextGeneration) -> AsyncGenerator[pb.GenerateResponse]:
    async with aclosing(generation.deltas()) as deltas:
        is_first = True
        async for delta in deltas:
            response = response_of(generation, delta)
            if is_first:
                response.input_logprobs.extend(prompt_told(generation))
                response.ticket = generation.ticket
                is_first = False
            yield response


def _tell_ledger(context: grpc.aio.ServicerContext, generation: TextGeneration) -> None:
    context.set_trailing_metadata(((LEDGER_KEY, json.dumps(generation.ledger_ms())),))


class AdminApi(admin_pb2_grpc.AdminServicer):
    def __init__(self, inference: InferenceApi, watches: Watches, changes: Changes) -> None:
        self._inference = inference
        self._watches = watches
        self._changes = changes

    async def GetKv(  # noqa: N802
        self, request: admin_pb2.GetKvRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.GetKvResponse:
        return await self._inference.dispatcher.debug_kv()

    async def TraceRequest(  # noqa: N802
        self, request: admin_pb2.TraceRequestRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.TraceRequestResponse:
        found = self._inference.dispatcher.trace(request.request_id)
        if not found.stories:
            await context.abort(grpc.StatusCode.NOT_FOUND, unknown(request.request_id))
        return found

    async def SetWorker(  # noqa: N802
        self, request: admin_pb2.SetWorkerRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.SetStateResponse:
        dispatcher = self._inference.dispatcher
        try:
            return await dispatcher.set_worker(request.worker, request.state)
        except LookupError as error:
            code, told = grpc.StatusCode.NOT_FOUND, str(error.args[0])
        except (PeerError, ValueError) as error:
            code, told = grpc.StatusCode.FAILED_PRECONDITION, str(error)
        raise await context.abort(code, told)

    async def Change(  # noqa: N802
        self, request: admin_pb2.ChangeRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ChangeResponse:
        return await answered(self._changes, request, context)

    async def Watch(  # noqa: N802
        self, request: admin_pb2.WatchClusterRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[admin_pb2.WatchReport]:
        try:
            self._watches.check(request.interval_s)
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Refused as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        reports = self._watches.reports(self._inference.watch_report, request.interval_s)
        async with aclosing(reports):
            async for report in reports:
                yield report


MOST_WATCHES = 256


class Health(health.aio.HealthServicer):
    """SERVING exactly while requests can be served, for the server and for the Inference
    service."""

    def __init__(self, service: TextService) -> None:
        super().__init__()
        self._service = service
        self._watches: set[asyncio.Task[None]] = set()
        self._told: object = None

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Runs until the client ends it, or `end_watches`."""
        if len(self._watches) >= MOST_WATCHES:
            told = f"{MOST_WATCHES} watches are open, and no more are accepted: use Check"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, told)
        watch = asyncio.create_task(super().Watch(request, context))
        self._watches.add(watch)
        try:
            await asyncio.wait((watch,))
        finally:
            watch.cancel()
            self._watches.discard(watch)
        if not watch.cancelled():
            watch.result()

    def end_watches(self) -> None:
        """Open watches would keep a stopping server from closing its port."""
        for watch in self._watches:
            watch.cancel()

    async def refresh(self) -> None:
        kinds = health_pb2.HealthCheckResponse
        can_serve = self._service.dispatcher.ready() and not self._service.leaving
        status = kinds.SERVING if can_serve else kinds.NOT_SERVING
        if status == self._told:
            return  # telling it again would wake every watch
        self._told = status
        for name in ("", SERVICE_NAME):
            await self.set(name, status)

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        await self.refresh()
        return await super().Check(request, context)


METADATA_BYTES = 64 * 1024
STREAMS_PER_CONNECTION = 1024
HANDSHAKE_S = 10
PUBLIC = (
    ("grpc.max_metadata_size", METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES),
    ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
    ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_S),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)
"""What a client may send beside its messages. A call over the number of streams waits at its
client. Pings find clients that have vanished."""


def create_public_server(
    api: InferenceApi, watcher: Health, max_body_bytes: int
) -> grpc.aio.Server:
    """The server for clients."""
    server = _server(watcher, (("grpc.max_receive_message_length", max_body_bytes), *PUBLIC))
    inference_pb2_grpc.add_InferenceServicer_to_server(api, server)
    reflection.enable_server_reflection((SERVICE_NAME, *STANDARD_NAMES), server)
    return server


REGISTERED = (
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
)
"""Both ends of a registration ping each other: nothing else is said, and either may vanish."""


def create_internal_server(admin: AdminApi, watcher: Health, token: bytes) -> grpc.aio.Server:
    """The server for operators, and for workers and pool nodes that register. All but its health
    needs the token."""
    server = _server(watcher, REGISTERED, [TokenCheck(token)])
    admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
    reflection.enable_server_reflection((ADMIN_NAME, REGISTRY_NAME, *STANDARD_NAMES), server)
    return server


_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
)
"""Without so_reuseport a second server on a busy port is an error, not an unnoticed twin. Clients
may ping while they wait for a token."""


def _server(
    watcher: Health,
    options: Sequence[tuple[str, int]] = (),
    checks: Sequence[grpc.aio.ServerInterceptor] = (),
) -> grpc.aio.Server:
    server = grpc.aio.server(options=(*_OPTIONS, *options), interceptors=checks)
    health_pb2_grpc.add_HealthServicer_to_server(watcher, server)
    return server
