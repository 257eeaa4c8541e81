"""Checks a user's sampling parameters and completes them for the workers, or refuses with a reason.

Absent parameters get the value of the checkpoint's generation config, then the neutral value.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from engine.model.checkpoint import eos_token_ids
from kvrelay.errors import InvalidRequest, ModelError
from kvrelay.types import Sampling
from router.core.state.generation import ModelFacts
from router.text.bounds import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS_ENTRIES,
    check_count,
    check_prompt_logprobs,
    check_stops,
)
from router.text.tokenizer import read_json

T = TypeVar("T", int, float)

MAX_TOP_K = 2**31 - 1
"""More than any vocabulary. The message to workers takes no more."""
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedSampling:
    """The request's parameters; None where absent. `echo`: the answer repeats the prompt.
    `grammar`, unless empty, is what the output must match, as llguidance writes it.
    `cut_to_context`: of `max_tokens` those count that fit into the model's context.
    `shown_special` are special tokens that are text though others are skipped."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    shown_special: frozenset[int] = frozenset()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: str = ""
    cut_to_context: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """From the checkpoint's generation_config.json, with its end-of-sequence ids."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def load(cls, folder: Path) -> GenerationDefaults:
        """Raises ModelError when a value has the wrong type."""
        generation = read_json(folder / "generation_config.json")
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: generation[name] for name in names if generation.get(name) is not None}
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ModelError(f"{folder}/generation_config.json: {name} must be a number")
        return cls(**given, eos_token_ids=eos_token_ids(folder))


def resolve(
    asked: RequestedSampling,
    *,
    prompt_tokens: int,
    defaults: GenerationDefaults,
    facts: ModelFacts,
) -> Sampling:
    """Raises InvalidRequest that names the first wrong parameter."""
    check_stops(asked.stop, asked.stop_token_ids)
    for token_id in asked.stop_token_ids:
        _token_id("stop_token_ids", token_id, facts.vocab_size)
    check_prompt_logprobs(prompt_tokens, asked.prompt_logprobs)
    top_k = _default(asked.top_k, defaults.top_k)
    max_tokens = _max_tokens(asked, prompt_tokens, facts.max_model_len)
    own_stops = () if asked.ignore_eos else defaults.eos_token_ids
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=_whole("min_tokens", asked.min_tokens, 0, max_tokens),
        seed=_seed(asked.seed),
        temperature=_number("temperature", _default(asked.temperature, defaults.temperature), 0),
        top_p=_top_p(_default(asked.top_p, defaults.top_p)),
        top_k=min(max(_whole("top_k", top_k, -1), 0), MAX_TOP_K),
        min_p=_number("min_p", _default(asked.min_p, defaults.min_p), 0, 1),
        frequency_penalty=_penalty("frequency_penalty", asked.frequency_penalty),
        presence_penalty=_penalty("presence_penalty", asked.presence_penalty),
        repetition_penalty=_repetition(
            _default(asked.repetition_penalty, defaults.repetition_penalty)
        ),
        stop_token_ids=tuple(dict.fromkeys((*own_stops, *asked.stop_token_ids))),
        n=_whole("n", asked.n, 1, MAX_CHOICES),
        logprobs=_logprobs("logprobs", asked.logprobs),
        prompt_logprobs=_logprobs("prompt_logprobs", asked.prompt_logprobs),
        logit_bias=_logit_bias(asked.logit_bias, facts.vocab_size),
        grammar=asked.grammar,
    )


def check_prompt(token_ids: tuple[int, ...], facts: ModelFacts) -> None:
    """Raises InvalidRequest if the prompt is empty, has unknown ids, or leaves no room for a
    token."""
    if not token_ids:
        raise InvalidRequest("the prompt is empty: send at least one token", param="prompt")
    if len(token_ids) >= facts.max_model_len:
        raise _context_exceeded(
            f"the prompt has {len(token_ids)} tokens but the model's context is "
            f"{facts.max_model_len} tokens, one of them for the answer: shorten the prompt",
            "prompt",
        )
    if max(token_ids) >= facts.vocab_size or min(token_ids) < 0:
        wrong = next(i for i in token_ids if not 0 <= i < facts.vocab_size)
        raise InvalidRequest(
            f"token id {wrong} of the prompt is out of the vocabulary [0, {facts.vocab_size})",
            param="prompt",
        )


def _context_exceeded(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, code="context_length_exceeded", param=param)


def _max_tokens(asked: RequestedSampling, prompt_tokens: int, max_model_len: int) -> int:
    """0 is allowed only where the answer includes the prompt."""
    room, most = max_model_len - prompt_tokens, asked.max_tokens
    if most is None:
        return room
    least = 0 if asked.echo or asked.prompt_logprobs is not None else 1
    if _whole("max_tokens", most, least) > room and not asked.cut_to_context:
        raise _context_exceeded(
            f"the prompt's {prompt_tokens} tokens and max_tokens {most} together exceed the "
            f"model's context of {max_model_len} tokens: at most {room} fit after this prompt",
            "max_tokens",
        )
    return min(most, room)


def _default(asked: T | None, otherwise: T) -> T:
    return otherwise if asked is None else asked


def _refuse(param: str, expected: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"{param} must be {expected}, not {value}", param=param)


def _number(param: str, value: float, low: float, high: float = math.inf) -> float:
    if not math.isfinite(value) or not low <= value <= high:
        raise _refuse(param, _range_text("a finite number", low, high), value)
    return float(value)


def _whole(param: str, value: int, low: int, high: float = math.inf) -> int:
    if value != int(value) or not low <= value <= high:
        raise _refuse(param, _range_text("a whole number", low, high), value)
    return int(value)


def _range_text(kind: str, low: float, high: float) -> str:
    if high == math.inf:
        return f"{kind} of at least {low}"
    return f"{kind} from {low} to {high}"


def _top_p(value: float) -> float:
    if not 0 < value <= 1:
        raise _refuse("top_p", "over 0 and at most 1", value)
    return float(value)


def _repetition(value: float) -> float:
    if not math.isfinite(value) or value <= 0:
        raise _refuse("repetition_penalty", "a finite number over 0", value)
    return float(value)


def _penalty(param: str, value: float | None) -> float:
    return _number(param, _default(value, 0.0), -MAX_PENALTY, MAX_PENALTY)


def _logprobs(param: str, value: int | None) -> int | None:
    return None if value is None else _whole(param, value, 0, MAX_LOGPROBS)


def _seed(value: int | None) -> int:
    """A negative seed counts as its two's complement. Without a seed one is drawn."""
    if value is None:
        return secrets.randbits(63)
    if not -(2**63) <= value < 2**64:
        raise _refuse("seed", "a 64-bit integer", value)
    return value % 2**64


def _token_id(param: str, token_id: int, vocab_size: int) -> int:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest(
            f"{param}: token id {token_id} is out of the vocabulary [0, {vocab_size})", param=param
        )
    return token_id


def _logit_bias(bias: Mapping[int, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    check_count("logit_bias", len(bias), MAX_LOGIT_BIAS_ENTRIES, "entries")
    return tuple(
        (
            _token_id("logit_bias", token_id, vocab_size),
            _number("logit_bias", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS),
        )
        for token_id, value in bias.items()
    )
