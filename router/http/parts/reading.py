"""A body with parts at any depth is read, and checked on a thread where it is large."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from router.http.bodies import Body, read_fields
from router.http.parts.strict import strict

INLINE_BYTES = 1 << 14


async def strict_body(request: Request, max_body_bytes: int, kind: type[Body]) -> Body:
    """Raises InvalidRequest."""
    fields = await read_fields(request, max_body_bytes)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) <= INLINE_BYTES:
        return strict(fields, kind)
    return await asyncio.to_thread(strict, fields, kind)
