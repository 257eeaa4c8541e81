"""kvrelay.v1.Inference's messages <-> the router's values."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from math import inf

from google.protobuf.json_format import MessageToDict

from kvrelay.errors import InvalidRequest
from kvrelay.types import Objectives
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire import logprobs_to_wire
from router.arriving.parts import PromptPart
from router.carried.continuation import Continuation, Delivered
from router.text.bounds import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    check_count,
)
from router.text.choices import TextDelta
from router.text.generation import TextGeneration
from router.text.grammar.grammars import (
    JSON_OBJECT,
    grammar_of_choices,
    grammar_of_lark,
    grammar_of_regex,
    grammar_of_schema,
    schema_of_text,
)
from router.text.request import ChatPrompt, PromptInput
from router.text.request_fields import FIELDS, objectives_of
from router.text.sampling import RequestedSampling

OPTIONAL_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "seed",
)


def sampling_of(message: pb.SamplingParams) -> RequestedSampling:
    """Raises InvalidRequest."""
    _check_counts(message)
    given = {name: getattr(message, name) for name in OPTIONAL_FIELDS if message.HasField(name)}
    return RequestedSampling(
        **given,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        skip_special_tokens=message.skip_special_tokens
        if message.HasField("skip_special_tokens")
        else True,
        include_stop_str_in_output=message.include_stop_str_in_output,
        ignore_eos=message.ignore_eos,
        n=message.n if message.HasField("n") else 1,
        logit_bias=dict(message.logit_bias),
        grammar=_grammar_of(message),
    )


def _check_counts(message: pb.SamplingParams) -> None:
    """Before anything goes over them."""
    check_count("stop", len(message.stop), MAX_STOP_STRINGS, "strings")
    check_count("stop_token_ids", len(message.stop_token_ids), MAX_STOP_TOKEN_IDS, "token ids")
    check_count("logit_bias", len(message.logit_bias), MAX_LOGIT_BIAS_ENTRIES, "entries")


def _grammar_of(message: pb.SamplingParams) -> str:
    """Empty: the output is free. Raises InvalidRequest."""
    match message.WhichOneof("constraint"):
        case "json_schema" as param:
            schema = schema_of_text(message.json_schema, param)
            return grammar_of_schema(schema, param=param)
        case "regex" as param:
            return grammar_of_regex(message.regex, param=param)
        case "grammar" as param:
            return grammar_of_lark(message.grammar, param=param)
        case "choice" as param:
            return grammar_of_choices(message.choice.choices, param=param)
        case "json_object" if message.json_object:
            return JSON_OBJECT
        case _:
            return ""


def objectives_in(slo: pb.Slo, call_remaining_s: float | None) -> Objectives:
    """The call's own deadline counts if it is earlier. Raises InvalidRequest."""
    given = {f"slo.{field.name}": value for field, value in slo.ListFields()}
    asked = objectives_of(given, FIELDS)
    if call_remaining_s is None or (asked.deadline_s or inf) <= call_remaining_s:
        return asked
    return replace(asked, deadline_s=call_remaining_s)


def prompt_of(request: pb.GenerateRequest) -> PromptInput:
    match request.WhichOneof("input"):
        case "tokenized":
            return tuple(request.tokenized.input_ids)
        case "text":
            return request.text
        case "chat":
            return _chat(request.chat)
        case _:
            raise InvalidRequest("set one of tokenized, text or chat", param="input")


async def first_part(parts: AsyncIterator[pb.PromptPart]) -> pb.PromptPart:
    """That of a request whose prompt arrives in parts. Raises InvalidRequest."""
    async for part in parts:
        if not part.HasField("request"):
            break
        return part
    raise InvalidRequest("the first message must have the request", param="request")


async def parts_of(
    first: pb.PromptPart, others: AsyncIterator[pb.PromptPart]
) -> AsyncIterator[PromptPart]:
    """Raises InvalidRequest."""
    if first.request.WhichOneof("input") is not None:
        yield PromptPart(content=_part_content(prompt_of(first.request)))
    if first.WhichOneof("part") is not None:
        yield _part(first)
    async for part in others:
        if part.HasField("request"):
            raise InvalidRequest("only the first message may have a request", param="request")
        yield _part(part)


def _part_content(prompt: PromptInput) -> str | tuple[int, ...]:
    if isinstance(prompt, ChatPrompt):
        raise InvalidRequest("a chat can't arrive in parts: send text or token ids", param="chat")
    return prompt


def _part(part: pb.PromptPart) -> PromptPart:
    offset = part.offset if part.HasField("offset") else None
    match part.WhichOneof("part"):
        case "text":
            return PromptPart(content=part.text, offset=offset)
        case "tokenized":
            return PromptPart(content=tuple(part.tokenized.input_ids), offset=offset)
        case _:
            raise InvalidRequest("a message has no part: set text or tokenized", param="part")


def _chat(chat: pb.ChatInput) -> ChatPrompt:
    if not chat.messages:
        raise InvalidRequest("messages is empty: send at least one", param="messages")
    check_count("messages", len(chat.messages), MAX_MESSAGES, "messages")
    return ChatPrompt(
        [{"role": m.role, "content": m.content} for m in chat.messages],
        template_kwargs={name: _variable(v) for name, v in _struct(chat).items()},
    )


def _struct(chat: pb.ChatInput) -> dict[str, object]:
    try:
        return MessageToDict(chat.chat_template_kwargs)
    except ValueError as error:
        param = "chat.chat_template_kwargs"
        raise InvalidRequest(f"{param}: {error}", param=param) from None


def _variable(value: object) -> object:
    """The protocol has no integers: without this a template would write 5 as 5.0."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_variable(one) for one in value]
        case dict():
            return {name: _variable(one) for name, one in value.items()}
        case _:
            return value


def continuation_of(request: pb.GenerateRequest) -> Continuation | None:
    if not request.HasField("continuation"):
        return None
    told = request.continuation
    check_count("continuation", len(told.choices), MAX_CHOICES, "choices")
    choices = (Delivered(token_ids=tuple(c.token_ids), finished=c.finished) for c in told.choices)
    return Continuation(choices=tuple(choices), ticket=told.ticket)


def prompt_told(generation: TextGeneration) -> list[pb.PromptLogprob]:
    """The prompt's part of the first message."""
    return [
        pb.PromptLogprob(
            token=pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob),
            top=[pb.TokenLogprob(token_id=i, logprob=logprob) for i, logprob in entry.top],
            rank=entry.rank,
        )
        for entry in generation.prompt_logprobs
    ]


def response_of(generation: TextGeneration, delta: TextDelta) -> pb.GenerateResponse:
    response = pb.GenerateResponse(
        request_id=generation.request_id,
        index=delta.choice,
        token_ids=delta.token_ids,
        text=delta.text,
        logprobs=map(logprobs_to_wire, delta.logprobs),
        finish_reason=delta.finish_reason or "",
        prompt_tokens=len(generation.prompt_ids),
        cached_tokens=generation.cached_tokens,
        completion_tokens=delta.completion_tokens,
        seed=generation.sampling.seed,
        capped_tokens=generation.capped_tokens,
        tier=generation.tier,
    )
    if delta.stop_string is not None:
        response.stop_string = delta.stop_string
    elif delta.stop_token_id is not None:
        response.stop_token_id = delta.stop_token_id
    return response
