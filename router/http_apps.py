"""The public and the internal ASGI application: routes, who may call them, error shapes, the echoed
x-request-id."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable, Collection

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrelay.access.token import refusal
from kvrelay.access.values import AUTHORIZATION
from kvrelay.errors import KvrelayError
from router.http import info
from router.http.api import HttpApi, json_bytes
from router.http.asking import Authentication
from router.http.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.http.chat import tokenizing
from router.http.chat.endpoint import chat_completions
from router.http.completions import completions
from router.http.description import answers
from router.http.description.document import document_of
from router.http.description.operation import (
    JSON_LINES,
    OF_BODIES,
    OF_GENERATION,
    OF_KEYS,
    Operation,
)
from router.http.errors import (
    ErrorReply,
    on_bug,
    on_disconnect,
    on_http_exception,
    on_kvrelay_error,
)
from router.http.messages import errors as anthropic_errors
from router.http.messages.bodies import CountTokensBody, MessagesBody
from router.http.messages.endpoint import count_tokens, create_message
from router.http.neutral_fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL, TEMPLATE_NEUTRAL
from router.http.responses.bodies import InputTokensBody, ResponsesBody
from router.http.responses.endpoint import (
    count_input_tokens,
    create_response,
    delete_response,
    get_response,
)
from router.http.streamed_input.endpoint import StreamedInputBody, streamed_completions

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")

METRICS = Route("/metrics", info.metrics)
PUBLIC = [
    Operation(
        path="/v1/completions",
        endpoint=completions,
        methods=("POST",),
        summary="Continues prompts.",
        body=CompletionBody,
        neutral=COMPLETION_NEUTRAL,
        answer=answers.CompletionAnswer,
        event=answers.CompletionEvent,
        errors=OF_GENERATION,
    ),
    Operation(
        path="/v1/completions/stream",
        endpoint=streamed_completions,
        methods=("POST",),
        summary="Continues a prompt that arrives in parts, a line of JSON each.",
        body=StreamedInputBody,
        body_type=JSON_LINES,
        neutral=COMPLETION_NEUTRAL,
        answer=answers.CompletionAnswer,
        event=answers.CompletionEvent,
        errors=OF_GENERATION,
    ),
    Operation(
        path="/v1/chat/completions",
        endpoint=chat_completions,
        methods=("POST",),
        summary="Answers in a chat.",
        body=ChatBody,
        neutral=CHAT_NEUTRAL,
        answer=answers.ChatAnswer,
        event=answers.ChatEvent,
        errors=OF_GENERATION,
    ),
    Operation(
        path="/v1/responses",
        endpoint=create_response,
        methods=("POST",),
        summary="Answers, as OpenAI's Responses API does.",
        body=ResponsesBody,
        neutral=ResponsesBody.neutral,
        answer=answers.ResponseAnswer,
        event=answers.ResponseEvent,
        has_done=False,
        errors=OF_GENERATION,
    ),
    Operation(
        path="/v1/responses/input_tokens",
        endpoint=count_input_tokens,
        methods=("POST",),
        summary="The number of tokens of a response's prompt.",
        body=InputTokensBody,
        neutral=InputTokensBody.neutral,
        answer=answers.InputTokens,
        errors=OF_BODIES,
    ),
    Operation(
        path="/v1/responses/{id}",
        endpoint=get_response,
        summary="A response that is kept.",
        answer=answers.ResponseAnswer,
        errors=frozenset({400, 404}),
    ),
    Operation(
        path="/v1/responses/{id}",
        endpoint=delete_response,
        methods=("DELETE",),
        summary="Forgets a response.",
        answer=answers.DeletedResponse,
        errors=frozenset({404}),
    ),
    Operation(
        path="/v1/messages",
        endpoint=create_message,
        methods=("POST",),
        summary="Answers, as Anthropic's Messages API does.",
        body=MessagesBody,
        neutral=MessagesBody.neutral,
        answer=answers.MessageAnswer,
        event=answers.MessageEvent,
        has_done=False,
        errors=OF_GENERATION | {529},
        error=answers.MessageError,
    ),
    Operation(
        path="/v1/messages/count_tokens",
        endpoint=count_tokens,
        methods=("POST",),
        summary="The number of tokens of a message's prompt.",
        body=CountTokensBody,
        neutral=CountTokensBody.neutral,
        answer=answers.MessageTokens,
        errors=OF_BODIES | {529},
        error=answers.MessageError,
    ),
    Operation(
        path="/v1/models",
        endpoint=info.models,
        summary="The model that is served.",
        answer=answers.ModelList,
        errors=OF_KEYS,
    ),
    Operation(
        path="/v1/models/{model:path}",
        endpoint=info.model,
        summary="One model.",
        answer=answers.ModelCard,
        errors=OF_KEYS | {404},
    ),
    Operation(
        path="/tokenize",
        endpoint=tokenizing.tokenize,
        methods=("POST",),
        summary="The token ids of a text or a chat.",
        body=TokenizeBody,
        neutral=TEMPLATE_NEUTRAL,
        answer=answers.TokenizeAnswer,
        errors=OF_BODIES,
    ),
    Operation(
        path="/detokenize",
        endpoint=tokenizing.detokenize,
        methods=("POST",),
        summary="The text of token ids.",
        body=DetokenizeBody,
        answer=answers.DetokenizeAnswer,
        errors=OF_BODIES,
    ),
    Operation(
        path="/health",
        endpoint=info.health,
        summary="Whether the router runs.",
        answer=answers.HealthAnswer,
    ),
    Operation(
        path="/ping",
        endpoint=info.ping,
        methods=("GET", "POST"),
        summary="Whether the router runs, without a body.",
    ),
    Operation(
        path="/load",
        endpoint=info.load,
        summary="The number of requests that run.",
        answer=answers.LoadAnswer,
        errors=OF_KEYS,
    ),
    Operation(
        path="/ready",
        endpoint=info.ready,
        summary="Whether requests can be served.",
        answer=answers.ReadyAnswer,
        unready=answers.NotReadyAnswer,
    ),
    Operation(
        path="/version",
        endpoint=info.version,
        summary="kvrelay's version.",
        answer=answers.VersionAnswer,
    ),
]
"""All of the public API: its routes and its description are made from this table."""
OPEN_PATHS = ("/health", "/ping", "/ready", "/version", "/openapi.json", METRICS.path)
"""Of the public application: for probes, which bring no API key. `/metrics` is there only where
`router.public_metrics` says so."""
INTERNAL_ROUTES = [METRICS, Route("/debug/kv", info.debug_kv)]


def create_public_app(api: HttpApi, *, with_metrics: bool = False) -> Starlette:
    """The application for clients."""
    guard = Middleware(Authentication, api=api, open_paths=OPEN_PATHS)
    routes = [one.route() for one in PUBLIC]
    routes.append(Route("/openapi.json", _description(api.version)))
    return _app(api, [*routes, *([METRICS] if with_metrics else [])], guard)


def _description(version: str) -> Callable[[Request], Awaitable[Response]]:
    made = json_bytes(document_of(PUBLIC, version))

    async def openapi(request: Request) -> Response:
        return Response(made, media_type="application/json")

    return openapi


def create_internal_app(api: HttpApi, token: bytes, *, open_metrics: bool = False) -> Starlette:
    """The application for operators, who have the cluster's token."""
    open_paths = (METRICS.path,) if open_metrics else ()
    return _app(api, INTERNAL_ROUTES, Middleware(TokenAsked, token, open_paths))


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


class TokenAsked:
    """Every path but the open ones needs the cluster's token, also one that doesn't exist."""

    def __init__(self, app: ASGIApp, token: bytes, open_paths: Collection[str]) -> None:
        self._app = app
        self._token = token
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = None
        if scope["type"] == "http" and scope["path"] not in self._open:
            reason = refusal(Headers(scope=scope).get(AUTHORIZATION, ""), self._token)
        answer = self._app if reason is None else _unauthorized(reason)
        await answer(scope, receive, send)


def _unauthorized(reason: str) -> ASGIApp:
    return ErrorReply(
        status=401,
        message=reason,
        type="invalid_request_error",
        code="no_cluster_token",
        headers={"www-authenticate": "Bearer"},
    ).response()
