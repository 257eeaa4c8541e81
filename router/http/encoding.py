"""JSON and server-sent events, as bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.responses import Response

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode

DONE_EVENT = b"data: [DONE]\n\n"


def json_bytes(value: object) -> bytes:
    return _encode(value).encode()


def event(value: object) -> bytes:
    return b"data: %b\n\n" % json_bytes(value)


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        json_bytes(value), status_code=status, headers=headers, media_type="application/json"
    )
