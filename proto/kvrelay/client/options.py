"""The options of `generate` and `stream`, with their help texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, cleandoc, signature
from textwrap import fill
from typing import TypedDict, TypeVar

from kvrelay.results import (
    Slo,
)

Method = TypeVar("Method", bound=Callable[..., object])


class SamplingOptions(TypedDict, total=False):
    """An absent option has the value of the model's generation config, then the neutral value."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    ignore_eos: bool
    n: int
    logprobs: int
    prompt_logprobs: int
    seed: int
    logit_bias: Mapping[int, float]
    json_schema: Mapping[str, object] | str
    json_object: bool
    regex: str
    choice: Sequence[str]
    grammar: str


class GenerateOptions(SamplingOptions, total=False):
    """The sampling options, and those of the request itself."""

    request_id: str
    model: str
    chat_template_kwargs: Mapping[str, object]
    tenant: str
    tier: str
    slo: Slo
    deadline_s: float
    ledger: bool


REQUEST_FIELDS = (
    *("request_id", "model", "chat_template_kwargs"),
    *("tenant", "tier", "slo", "deadline_s", "ledger"),
)

RETRIES_HELP = (
    "A refused request is sent again up to this many times, at the time that its refusal names."
)
HELP: Mapping[str, str] = {
    "temperature": "0 takes the likeliest token; higher values draw more evenly.",
    "top_p": "Draw from the likeliest tokens that together have this probability.",
    "top_k": "Draw from this many likeliest tokens; 0 or -1: from all.",
    "min_p": "Leave out tokens below this share of the likeliest one's probability.",
    "frequency_penalty": "Subtracted from a token's logit for each time it was generated.",
    "presence_penalty": "Subtracted from a token's logit once it was generated.",
    "repetition_penalty": "Divides the logits of tokens of the prompt and the output; 1: none.",
    "max_tokens": "At most this many tokens; absent: the rest of the context.",
    "min_tokens": "No end and no stop before this many tokens.",
    "stop": "Strings that end the output.",
    "stop_token_ids": "Tokens that end the output.",
    "skip_special_tokens": "Leave special tokens out of the text; on by default.",
    "include_stop_str_in_output": "Keep the stop string in the text.",
    "ignore_eos": "Continue after the model's own end, up to max_tokens.",
    "n": "How many answers to draw.",
    "logprobs": "Return each token's log probability, and this many of the likeliest.",
    "prompt_logprobs": "The same for the tokens of the prompt, which is then computed whole.",
    "seed": "The same seed draws the same tokens; absent: a random one, which the answer names.",
    "logit_bias": "Added to the logits, by token id.",
    "json_schema": "The output is JSON that is valid for this schema.",
    "json_object": "The output is a JSON object.",
    "regex": "The whole output matches this regular expression.",
    "choice": "The output is one of these texts.",
    "grammar": "The output matches this grammar, in llguidance's Lark.",
    "request_id": "The id in logs and for `kvrelay trace`; absent: a random one.",
    "model": "Refuse any other model.",
    "chat_template_kwargs": "Variables for the chat template, such as enable_thinking.",
    "tenant": "Requests of different tenants share no cached KV.",
    "tier": "The QoS tier, one of those that the cluster file names.",
    "slo": "Objectives: time to first token and per token; absent: those of the tier.",
    "deadline_s": "Stop when this many seconds have passed, waits before retries included.",
    "ledger": "Return the time that each phase took, in `ledger_ms`.",
}
"""# option |-> its help text"""


class _Absent:
    """The default that `help()` shows: the option is not sent."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


def with_options(method: Method) -> Method:
    """Shows each option in the signature and the docstring; an option without help is a bug."""
    given = signature(method)
    own = [p for p in given.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    options = [_parameter(name, kind) for name, kind in _annotations().items()]
    method.__signature__ = given.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    lines = [_described("retries", RETRIES_HELP)]
    lines += [_described(name, HELP[name]) for name in _annotations()]
    method.__doc__ = "\n".join([cleandoc(method.__doc__ or ""), "", "Options:", *lines])
    return method


def _annotations() -> dict[str, object]:
    return SamplingOptions.__annotations__ | GenerateOptions.__annotations__


def _parameter(name: str, kind: object) -> Parameter:
    text = getattr(kind, "__forward_arg__", kind)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=ABSENT, annotation=text)


def _described(name: str, text: str) -> str:
    return fill(f"{name}: {text}", 96, initial_indent="    ", subsequent_indent="        ")
