"""The parts that every HTTP endpoint needs: work that ends when its client disconnects, at whatever
moment, and JSON and server-sent events as bytes."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from router.chat.conversations import KeptConversations
from router.core.state.story import ID_LENGTH
from router.http.event_stream import KEEP_ALIVE_S
from router.text.service import TextService


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpApi:
    service: TextService
    max_body_bytes: int
    version: str
    started_s: float
    """Unix time."""
    conversations: KeptConversations
    keep_alive_s: float = KEEP_ALIVE_S
    """A stream without a token for this long gets a comment."""


def api_of(request: Request) -> HttpApi:
    api = request.app.state.api
    assert isinstance(api, HttpApi)
    return api


def new_id(prefix: str, request: Request) -> str:
    """Begins with the request's x-request-id. It is unique, because clients may send one id many
    times."""
    return f"{prefix}-{request.state.request_id[:ID_LENGTH]}-{uuid.uuid4().hex[:8]}"


async def _disconnected(receive: Receive) -> None:
    """The body has been read: only the disconnect matters from here."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Returns when `work` has ended, finished or cancelled. Raises its error."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.wait((working, watching))
    if not working.cancelled():
        working.result()


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode

STEP_VALUES = 500

DONE_EVENT = b"data: [DONE]\n\n"


def json_bytes(value: object) -> bytes:
    """A lone surrogate that a client sent becomes JSON's escape of it."""
    return _encode(value).encode(errors="backslashreplace")


def long_json_bytes(value: object) -> bytes:
    """The same bytes, written in steps: other threads have their turn between two of them."""
    match value:
        case dict():
            items = (json_bytes(key) + b":" + long_json_bytes(one) for key, one in value.items())
            return b"{" + b",".join(items) + b"}"
        case list() if len(value) > STEP_VALUES:
            steps = (value[at : at + STEP_VALUES] for at in range(0, len(value), STEP_VALUES))
            return b"[" + b",".join(json_bytes(step)[1:-1] for step in steps) + b"]"
        case list():
            return b"[" + b",".join(map(long_json_bytes, value)) + b"]"
        case _:
            return json_bytes(value)


def event(value: object) -> bytes:
    return event_of(json_bytes(value))


def event_of(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


def named_event(name: str, value: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json_bytes(value))


def json_response(
    value: object | bytes, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        value if isinstance(value, bytes) else json_bytes(value),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )
