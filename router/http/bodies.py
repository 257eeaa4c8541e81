"""HTTP body -> strict model, or an InvalidRequest that names the field and what was expected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from kvrelay.errors import InvalidRequest
from router.http.errors import BodyTooLarge, UnsupportedMediaType
from router.http.neutral_fields import MESSAGE_NEUTRAL, Neutral

Body = TypeVar("Body", bound=BaseModel)


async def read_body(
    request: Request, kind: type[Body], neutral: Mapping[str, Neutral], max_body_bytes: int
) -> Body:
    """Raises InvalidRequest; BodyTooLarge and UnsupportedMediaType are kinds of it."""
    _check_media_type(request)
    fields = _json_object(await _read(request, max_body_bytes))
    _drop_neutral(fields, neutral, "")
    for position, message in enumerate(_message_objects(fields)):
        _drop_neutral(message, MESSAGE_NEUTRAL, f"messages[{position}].")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error) from None


def _message_objects(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = fields.get("messages")
    return [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []


def _check_media_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "application/json").split(";")[0].strip()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType(
            f"the content type is {media_type!r}: send application/json",
            code="unsupported_media_type",
        )


async def _read(request: Request, max_body_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_body_bytes:
        raise _too_large(max_body_bytes)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_body_bytes:
            raise _too_large(max_body_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body exceeds the limit of {limit} bytes", code="body_too_large")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return value


def _drop_neutral(fields: dict[str, Any], neutral: Mapping[str, Neutral], prefix: str) -> None:
    """Known fields without an effect here leave; one with a value that asks for more is refused."""
    for name in neutral.keys() & fields.keys():
        if not neutral[name].accepts(fields.pop(name)):
            raise InvalidRequest(
                f"{prefix}{name} is not supported: {_advice(neutral[name])}",
                code="unsupported_parameter",
                param=f"{prefix}{name}",
            )


def _advice(neutral: Neutral) -> str:
    instead = f"{neutral.instead}; " if neutral.instead else ""
    accepted = " or ".join(json.dumps(value) for value in (None, *neutral.values))
    return f"{instead}leave it out or send {accepted}"


EITHER = {
    "prompt": "a string, token ids (whole numbers from 0), or a list of strings or of token ids",
    "stop": "a string or a list of strings",
    "content": 'a string or a list of {"type": "text", "text": ...}',
}
"""# field of several types |-> what it may be: pydantic would complain of each type in turn"""


def _invalid(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    where = first["loc"]
    for position, part in enumerate(where):
        if part in EITHER:
            path = _path(where[: position + 1])
            return InvalidRequest(f"{path} must be {EITHER[part]}", code="invalid_type", param=path)
    path = _path(where)
    match first["type"]:
        case "extra_forbidden":
            return InvalidRequest(f"unknown field {path!r}", code="unknown_parameter", param=path)
        case "missing":
            message = f"the field {path!r} is missing"
            return InvalidRequest(message, code="missing_parameter", param=path)
        case _:
            return InvalidRequest(f"{path}: {first['msg']}", code="invalid_type", param=path)


def _path(where: tuple[int | str, ...]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in where]
    return "".join(parts).removeprefix(".")
