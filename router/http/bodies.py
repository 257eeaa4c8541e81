"""An HTTP body becomes a strict model, or an InvalidRequest that names the field and what is
expected.

Fields must be in the models here or among the neutral ones (`router.http.neutral_fields`); others
are refused, never ignored.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from kvrelay.errors import InvalidRequest
from kvrelay.types import Objectives, value
from router.http.errors import BodyTooLarge, UnsupportedMediaType
from router.http.neutral_fields import MESSAGE_NEUTRAL, Neutral
from router.text.continuation import Continuation, Delivered
from router.text.request_fields import HEADERS, objectives_of
from router.text.sampling import RequestedSampling
from router.text.service import TextDelta

Body = TypeVar("Body", bound=BaseModel)


async def read_body(
    request: Request, kind: type[Body], neutral: Mapping[str, Neutral], max_body_bytes: int
) -> Body:
    """Raises InvalidRequest, of which BodyTooLarge and UnsupportedMediaType are kinds."""
    return parsed(await read_fields(request, max_body_bytes), kind, neutral)


async def read_fields(request: Request, max_body_bytes: int) -> dict[str, Any]:
    """Raises InvalidRequest, of which BodyTooLarge and UnsupportedMediaType are kinds."""
    _check_media_type(request)
    return json_object(await _read(request, max_body_bytes))


def parsed(fields: dict[str, Any], kind: type[Body], neutral: Mapping[str, Neutral]) -> Body:
    """Raises InvalidRequest."""
    _drop_neutral(fields, neutral, "")
    for position, message in enumerate(_message_objects(fields)):
        _drop_neutral(message, MESSAGE_NEUTRAL, f"messages[{position}].")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise invalid_fields(error) from None


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


def json_object(body: bytes) -> dict[str, Any]:
    """Raises InvalidRequest for anything else."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return value


def _drop_neutral(fields: dict[str, Any], neutral: Mapping[str, Neutral], prefix: str) -> None:
    """Removes known fields without an effect here. A value that would need one is refused."""
    for name in neutral.keys() & fields.keys():
        if not neutral[name].accepts(fields.pop(name)):
            raise InvalidRequest(
                f"{prefix}{name} is not supported: {neutral[name].advice()}",
                code="unsupported_parameter",
                param=f"{prefix}{name}",
            )


EITHER = {
    "prompt": "a string, token ids (whole numbers from 0), or a list of strings or of token ids",
    "stop": "a string or a list of strings",
    "content": 'a string or a list of {"type": "text", "text": ...}',
}
"""# field of several types |-> its types in words, because pydantic would name each type in turn"""


def invalid_fields(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    where = first["loc"]
    for position, part in enumerate(where):
        if part in EITHER and not _is_told_apart(first):
            path = _path(where[: position + 1])
            return InvalidRequest(f"{path} must be {EITHER[part]}", code="invalid_type", param=path)
    path = _path(where)
    match first["type"]:
        case "extra_forbidden":
            return InvalidRequest(f"unknown field {path!r}", code="unknown_parameter", param=path)
        case "neutral":
            path = _path((*where, first["ctx"]["field"]))
            message = f"{path} is not supported: {first['msg']}"
            return InvalidRequest(message, code="unsupported_parameter", param=path)
        case "unexpected_kind":
            message = f"{path} {first['msg']}"
            return InvalidRequest(message, code="unsupported_parameter", param=path)
        case "missing":
            message = f"the field {path!r} is missing"
            return InvalidRequest(message, code="missing_parameter", param=path)
        case _:
            return InvalidRequest(f"{path}: {first['msg']}", code="invalid_type", param=path)


BY_TYPE = "~"
"""Begins the name of one of several types. It is no part of a field's path."""


def _is_told_apart(error: ErrorDetails) -> bool:
    """The models tell the types of its field apart, so the error itself says what is expected."""
    named = (isinstance(part, str) and part.startswith(BY_TYPE) for part in error["loc"])
    return error["type"] in ("neutral", "unexpected_kind") or any(named)


def _path(where: tuple[int | str, ...]) -> str:
    parts = [
        f"[{part}]" if isinstance(part, int) else f".{part}"
        for part in where
        if isinstance(part, int) or not part.startswith(BY_TYPE)
    ]
    return "".join(parts).removeprefix(".")


TokenId = Annotated[int, Field(ge=0, lt=2**32)]


class StrictBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None
    """From vLLM: with `include_usage`, every chunk has the usage so far."""


class DeliveredBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    token_ids: list[TokenId]
    finished: bool = False


class ContinuationBody(BaseModel):
    """What the client has of each choice, and the `ticket` of the first event."""

    model_config = ConfigDict(extra="forbid", strict=True)

    choices: list[DeliveredBody]
    ticket: str = ""


class AskingBody(StrictBody):
    """Fields of all calls that generate. null means: not given."""

    cache_salt: str | None = None
    """From vLLM: requests with different salts share no cached KV."""
    tier: str | None = None
    """The QoS tier."""


class GenerationBody(AskingBody):
    """Fields of both completions and chat completions."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """Wins over `max_tokens`."""
    min_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    continuation: ContinuationBody | None = None
    """For a stream that lost its router."""


class CompletionFields(GenerationBody):
    """Those of a completion, but for its prompt."""

    logprobs: int | None = None
    echo: bool | None = None


class CompletionBody(CompletionFields):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: str
    text: str | None = None


class MessageBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None


class ChatBody(GenerationBody):
    messages: list[MessageBody]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(StrictBody):
    """As in vLLM: a prompt or messages."""

    prompt: str | None = None
    messages: list[MessageBody] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(StrictBody):
    tokens: list[TokenId]


LEDGER_HEADER = "x-kvrelay-ledger"


@value
class StreamFlags:
    """`continuous_usage`: every chunk has the usage so far."""

    stream: bool
    include_usage: bool
    continuous_usage: bool


def sampling_of(
    body: GenerationBody,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
    echo: bool = False,
) -> RequestedSampling:
    longest = body.max_completion_tokens
    return RequestedSampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        max_tokens=body.max_tokens if longest is None else longest,
        min_tokens=body.min_tokens or 0,
        stop=_strings(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        n=1 if body.n is None else body.n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        seed=body.seed,
        logit_bias=_logit_bias(body.logit_bias),
    )


def _strings(stop: str | list[str] | None) -> tuple[str, ...]:
    match stop:
        case None:
            return ()
        case str():
            return (stop,)
        case list():
            return tuple(stop)


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    try:
        return {int(token_id): value for token_id, value in (bias or {}).items()}
    except ValueError:
        raise InvalidRequest(
            'logit_bias: the keys must be token ids, such as "50256"', param="logit_bias"
        ) from None


def continuation_of(body: GenerationBody) -> Continuation | None:
    """Raises InvalidRequest."""
    told = body.continuation
    if told is None:
        return None
    try:
        ticket = b64decode(told.ticket, validate=True)
    except ValueError:
        raise InvalidRequest("continuation.ticket is not Base64", param="continuation") from None
    return Continuation(
        choices=tuple(
            Delivered(token_ids=tuple(one.token_ids), finished=one.finished) for one in told.choices
        ),
        ticket=ticket,
    )


def stream_flags(body: GenerationBody) -> StreamFlags:
    """Raises InvalidRequest."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(
            "stream_options needs stream: true", code="invalid_value", param="stream_options"
        )
    options = body.stream_options or StreamOptions()
    include_usage = bool(options.include_usage)
    return StreamFlags(
        stream=bool(body.stream),
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options.continuous_usage_stats),
    )


def objectives_in(request: Request) -> Objectives:
    """The objectives in the request's headers. Raises InvalidRequest."""
    return objectives_of(request.headers, HEADERS)


def wants_ledger(request: Request) -> bool:
    return request.headers.get(LEDGER_HEADER, "0") not in ("", "0")


def stop_reason(delta: TextDelta, eos_ids: Sequence[int]) -> str | int | None:
    """As in vLLM: the stop string or stop token id; null for an end-of-sequence id."""
    if delta.stop_string is not None:
        return delta.stop_string
    return None if delta.stop_token_id in eos_ids else delta.stop_token_id
