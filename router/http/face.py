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


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
