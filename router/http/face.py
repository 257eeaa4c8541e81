"""What every HTTP endpoint needs."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from starlette.requests import Request

from router.http.event_stream import KEEP_ALIVE_S
from router.serving import TextService


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpFace:
    service: TextService
    max_body_bytes: int
    version: str
    started_s: float
    """Unix time."""
    keep_alive_s: float = KEEP_ALIVE_S
    """A stream without a token for so long gets a comment."""


def face_of(request: Request) -> HttpFace:
    face = request.app.state.face
    assert isinstance(face, HttpFace)
    return face


ID_LENGTH = 200
"""Of a client's x-request-id: with what is added it stays below what workers take."""


def new_id(prefix: str, request: Request) -> str:
    """Begins with the request's x-request-id; unique, since clients may send one id many times."""
    return f"{prefix}-{request.state.request_id[:ID_LENGTH]}-{uuid.uuid4().hex[:8]}"
