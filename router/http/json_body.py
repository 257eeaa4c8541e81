"""A body's bytes become a JSON object, within bounds on size, time and number of values.

Parsing JSON holds the interpreter, whatever thread does it. So what would take long is refused
before: strings are cheap however long they are, and everything else is counted.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NoReturn

from starlette.requests import Request

from kvrelay.errors import InvalidRequest
from router.http.errors import BodyTimeout, BodyTooLarge

BODY_S = 30.0
"""A body must have come within this time."""
MAX_VALUES = 1 << 17
"""Of one body; so many numbers are parsed in about 20 ms."""
CONTAINER_VALUES = 8
"""A list, an object or a key takes as long as so many numbers."""
MAX_DIGITS = 40
"""Of one number: with more digits than that, parsing takes quadratic time."""

_LONG_NUMBER = re.compile(rb"\d{%d}" % (MAX_DIGITS + 1))
_STEP_BYTES = 1 << 15
_CHEAP_BYTES = 1 << 14
"""So short a body is parsed at once, whatever it holds."""


async def read_bytes(request: Request, most_bytes: int) -> bytes:
    """Raises BodyTooLarge or BodyTimeout."""
    declared = request.headers.get("content-length", "")
    if len(declared) > 15 or (declared.isdigit() and int(declared) > most_bytes):
        raise _too_large(most_bytes)
    try:
        async with asyncio.timeout(BODY_S):
            return await _read(request, most_bytes)
    except TimeoutError:
        raise BodyTimeout(
            f"the body has not come within {BODY_S:g} s: send it faster, or in parts to "
            "/v1/completions/stream",
            code="body_timeout",
        ) from None


async def _read(request: Request, most_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most_bytes:
            raise _too_large(most_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body exceeds the limit of {limit} bytes", code="body_too_large")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


async def json_object(body: bytes) -> dict[str, Any]:
    """Raises InvalidRequest for anything else."""
    if len(body) > _CHEAP_BYTES:
        await asyncio.to_thread(check_values, body)
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return value


def check_values(body: bytes) -> None:
    """Raises InvalidRequest for more values than MAX_VALUES, or for too long a number. It goes in
    small steps, so that other threads have their turn."""
    values = at = 0
    while at < len(body):
        begin = body.find(b'"', at, at + _STEP_BYTES)
        end = min(at + _STEP_BYTES, len(body)) if begin < 0 else begin
        values += _values(body[at:end])
        _check(values)
        at = end if begin < 0 else _behind_string(body, begin + 1)


def _behind_string(body: bytes, at: int) -> int:
    """`at` is behind its opening quote."""
    while (quote := body.find(b'"', at)) >= 0:
        before = body[at:quote]
        at = quote + 1
        if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
            return at
    return len(body)


def _values(outside: bytes) -> int:
    """What stands outside of strings."""
    if len(outside) > MAX_DIGITS and _LONG_NUMBER.search(outside):
        raise InvalidRequest(
            f"the body has a number of over {MAX_DIGITS} digits: shorten it", code="invalid_json"
        )
    expensive = outside.count(b":") + outside.count(b"[") + outside.count(b"{")
    return outside.count(b",") + CONTAINER_VALUES * expensive


def _check(values: int) -> None:
    if values > MAX_VALUES:
        raise InvalidRequest(
            f"the body has more than {MAX_VALUES} JSON values, where a list, an object or a key "
            f"counts as {CONTAINER_VALUES}: send several calls, or a prompt as text",
            code="too_many_values",
        )
