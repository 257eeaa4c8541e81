"""The public and the internal ASGI application: routes, who may call them, error shapes, the echoed
x-request-id."""

from __future__ import annotations

import re
import uuid

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrelay.errors import KvrelayError
from router.http import info
from router.http.api import HttpApi
from router.http.asking import Authentication
from router.http.chat.endpoint import chat_completions
from router.http.completions import completions
from router.http.errors import on_bug, on_disconnect, on_http_exception, on_kvrelay_error
from router.http.messages import errors as anthropic_errors
from router.http.messages.endpoint import count_tokens, create_message
from router.http.responses.endpoint import (
    count_input_tokens,
    create_response,
    delete_response,
    get_response,
)
from router.http.streamed_input.endpoint import streamed_completions

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")

METRICS = Route("/metrics", info.metrics)
PUBLIC_ROUTES = [
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/completions/stream", streamed_completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"]),
    Route("/v1/responses/{id}", get_response, methods=["GET"]),
    Route("/v1/responses/{id}", delete_response, methods=["DELETE"]),
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/models", info.models),
    Route("/v1/models/{model:path}", info.model),
    Route("/tokenize", info.tokenize, methods=["POST"]),
    Route("/detokenize", info.detokenize, methods=["POST"]),
    Route("/health", info.health),
    Route("/ping", info.ping, methods=["GET", "POST"]),
    Route("/load", info.load),
    Route("/ready", info.ready),
    Route("/version", info.version),
]
OPEN_PATHS = ("/health", "/ping", "/ready", "/version", "/openapi.json", METRICS.path)
"""Of the public application: for probes, which bring no API key. `/metrics` is there only where
`router.public_metrics` says so."""
INTERNAL_ROUTES = [METRICS, Route("/debug/kv", info.debug_kv)]


def create_public_app(api: HttpApi, *, with_metrics: bool = False) -> Starlette:
    """The application for clients."""
    guard = Middleware(Authentication, api=api, open_paths=OPEN_PATHS)
    return _app(api, [*PUBLIC_ROUTES, *([METRICS] if with_metrics else [])], guard)


def create_internal_app(api: HttpApi) -> Starlette:
    """The application for operators."""
    return _app(api, INTERNAL_ROUTES)


def _app(api: HttpApi, routes: list[Route], *guards: Middleware) -> Starlette:
    app = Starlette(
        routes=routes,
        middleware=[Middleware(RequestIdEcho), *guards],
        exception_handlers={
            KvrelayError: on_kvrelay_error,
            HTTPException: on_http_exception,
            ClientDisconnect: on_disconnect,
            Exception: on_bug,
        },
    )
    app.state.api = api
    app.state.error_shapes = {"/v1/messages": anthropic_errors.respond}
    return app


class RequestIdEcho:
    """Every response has x-request-id: the client's own, or a new one. Logs and `/debug/kv` show
    the request under an id that contains it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"x-request-id", request_id.encode()))
            await send(message)

        await self._app(scope, receive, send_with_id)
