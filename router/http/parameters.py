"""Request body -> the face-independent sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from kvrelay.errors import InvalidRequest
from kvrelay.types import Objectives
from kvrelay.values import value
from router.asked_objectives import HEADERS, objectives_of
from router.choice_text import TextDelta
from router.http.body_fields import GenerationBody, StreamOptions
from router.sampling_defaults import RequestedSampling

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
    """Of its headers. Raises InvalidRequest."""
    return objectives_of(request.headers, HEADERS)


def wants_ledger(request: Request) -> bool:
    return request.headers.get(LEDGER_HEADER, "0") not in ("", "0")


def stop_reason(delta: TextDelta, eos_ids: Sequence[int]) -> str | int | None:
    """vLLM's: the stop string or stop token id; null for an end-of-sequence id."""
    if delta.stop_string is not None:
        return delta.stop_string
    return None if delta.stop_token_id in eos_ids else delta.stop_token_id
