"""An HTTP body becomes a strict model, or an InvalidRequest that names the field and what is
expected.

Fields must be in the models here or among the neutral ones (`router.http.neutral_fields`); others
are refused, never ignored.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from kvrelay.errors import InvalidRequest
from kvrelay.types import Objectives, value
from router.carried.continuation import Continuation, Delivered
from router.http.errors import UnsupportedMediaType
from router.http.json_body import json_object, read_bytes
from router.http.neutral_fields import MESSAGE_NEUTRAL, Neutral
from router.http.structured import ResponseFormat, StructuredOutputs, grammar_of
from router.http.tool_bodies import ToolBody, ToolCallBody, ToolChoiceBody
from router.text.choices import TextDelta
from router.text.request_fields import HEADERS, objectives_of
from router.text.sampling import RequestedSampling

Body = TypeVar("Body", bound=BaseModel)


async def read_body(
    request: Request, kind: type[Body], neutral: Mapping[str, Neutral], max_body_bytes: int
) -> Body:
    """Raises InvalidRequest, of which those in `router.http.errors` are kinds."""
    body = parsed(await read_fields(request, max_body_bytes), kind, neutral)
    await asyncio.sleep(0)  # to make a request of thousands of messages takes as long again
    return body


async def read_fields(request: Request, max_body_bytes: int) -> dict[str, Any]:
    """Raises InvalidRequest, of which those in `router.http.errors` are kinds."""
    _check_media_type(request)
    return await json_object(await read_bytes(request, max_body_bytes))


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
    "schema": "a JSON schema: an object",
    "json": "a JSON schema: an object, or its text",
    "content": 'a string or a list of {"type": "text", "text": ...}',
    "tool_choice": 'none, auto, required or {"type": "function", "function": {"name": ...}}',
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
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
"""Of long lists only the first fault is looked for."""


def _kind_of_prompt(prompt: object) -> str:
    """By its first part, because trying each kind in turn takes long."""
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    match first:
        case str():
            return "text" if first is prompt else "texts"
        case list():
            return "many ids" if first is not prompt else "texts"
        case _:
            return "ids"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(fail_fast=True), Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[TokenIds], Field(fail_fast=True), Tag("many ids")],
    Discriminator(_kind_of_prompt),
]


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

    token_ids: TokenIds
    finished: bool = False


class ContinuationBody(BaseModel):
    """What the client has of each choice, and the `ticket` of the first event."""

    model_config = ConfigDict(extra="forbid", strict=True)

    choices: Annotated[list[DeliveredBody], Field(fail_fast=True)]
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
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """From vLLM."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    continuation: ContinuationBody | None = None
    """For a stream that lost its router."""


class CompletionFields(GenerationBody):
    """Those of a completion, but for its prompt."""

    logprobs: int | None = None
    echo: bool | None = None


class CompletionBody(CompletionFields):
    prompt: Prompt


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: str
    text: str | None = None


class MessageBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: str
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(fail_fast=True)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """Another name of `reasoning`."""


Messages = Annotated[list[MessageBody], Field(fail_fast=True)]


Tools = Annotated[list[ToolBody], Field(fail_fast=True)]


class ChatBody(GenerationBody):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: str | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    prompt_token_ids: TokenIds | None = None
    """The prompt, if its template was rendered elsewhere. `messages` is not read then."""


class TokenizeBody(StrictBody):
    """As in vLLM: a prompt or messages."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(StrictBody):
    tokens: TokenIds


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
        stop=stop_strings(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        n=1 if body.n is None else body.n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        seed=body.seed,
        logit_bias=logit_bias_of(body.logit_bias),
        grammar=grammar_of(body.response_format, body.structured_outputs),
    )


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    match stop:
        case None:
            return ()
        case str():
            return (stop,)
        case list():
            return tuple(stop)


def logit_bias_of(bias: dict[str, float] | None) -> dict[int, float]:
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
