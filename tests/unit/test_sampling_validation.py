"""Every sampling parameter: what is passed on, what is refused and in which words."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvrelay.errors import InvalidRequest, ModelError
from kvrelay.types import Sampling
from router.core.state.generation import ModelFacts
from router.text.sampling import GenerationDefaults, RequestedSampling, check_prompt, resolve

FACTS = ModelFacts(architecture="A", fingerprint="f", max_model_len=100, vocab_size=50)
DEFAULTS = GenerationDefaults(eos_token_ids=(2, 3))


def resolved(defaults: GenerationDefaults = DEFAULTS, **asked: Any) -> Sampling:
    return resolve(RequestedSampling(**asked), prompt_tokens=10, defaults=defaults, facts=FACTS)


def test_absent_parameters_are_neutral() -> None:
    sampling = resolved(seed=7)
    assert sampling == Sampling(
        max_tokens=90, seed=7, temperature=1.0, stop_token_ids=(2, 3), logprobs=None
    )


def test_absent_parameters_take_the_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 20})
    )
    sampling = resolved(GenerationDefaults.load(tmp_path), top_k=5)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 5)
    assert sampling.stop_token_ids == (9,)


def test_generation_config_with_a_wrong_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ModelError, match="temperature must be a number"):
        GenerationDefaults.load(tmp_path)


GOOD: list[tuple[str, Any, Any]] = [
    ("temperature", 0, 0.0),
    ("temperature", 5.5, 5.5),
    ("top_p", 1, 1.0),
    ("top_p", 1e-6, 1e-6),
    ("top_k", -1, 0),
    ("top_k", 0, 0),
    ("top_k", 10**6, 10**6),
    ("top_k", 2**40, 2**31 - 1),
    ("min_p", 1, 1.0),
    ("frequency_penalty", -2, -2.0),
    ("presence_penalty", 2, 2.0),
    ("repetition_penalty", 0.1, 0.1),
    ("max_tokens", 90, 90),
    ("min_tokens", 90, 90),
    ("n", 128, 128),
    ("logprobs", 0, 0),
    ("logprobs", 20, 20),
    ("prompt_logprobs", 0, 0),
    ("prompt_logprobs", 20, 20),
    ("seed", -1, 2**64 - 1),
    ("seed", 2**64 - 1, 2**64 - 1),
    ("logit_bias", {49: -100}, ((49, -100.0),)),
    ("stop_token_ids", (49, 2), (2, 3, 49)),
]


@pytest.mark.parametrize(("name", "value", "expected"), GOOD)
def test_values_in_range_are_passed_on(name: str, value: Any, expected: Any) -> None:
    assert getattr(resolved(**{name: value}), name) == expected


BAD: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, "temperature must be a finite number of at least 0, not -0.1"),
    ("temperature", math.nan, "temperature must be a finite number of at least 0, not nan"),
    ("temperature", math.inf, "temperature must be a finite number of at least 0, not inf"),
    ("top_p", 0, "top_p must be over 0 and at most 1, not 0"),
    ("top_p", 1.01, "top_p must be over 0 and at most 1, not 1.01"),
    ("top_p", math.nan, "top_p must be over 0 and at most 1, not nan"),
    ("top_k", -2, "top_k must be a whole number of at least -1, not -2"),
    ("min_p", -0.1, "min_p must be a finite number from 0 to 1, not -0.1"),
    ("min_p", 1.1, "min_p must be a finite number from 0 to 1, not 1.1"),
    ("frequency_penalty", 2.1, "frequency_penalty must be a finite number from -2.0 to 2.0"),
    ("presence_penalty", -2.1, "presence_penalty must be a finite number from -2.0 to 2.0"),
    ("presence_penalty", math.nan, "presence_penalty must be a finite number"),
    ("repetition_penalty", 0, "repetition_penalty must be a finite number over 0, not 0"),
    ("repetition_penalty", math.inf, "repetition_penalty must be a finite number over 0"),
    ("max_tokens", 0, "max_tokens must be a whole number of at least 1, not 0"),
    ("min_tokens", -1, "min_tokens must be a whole number from 0 to 90, not -1"),
    ("min_tokens", 91, "min_tokens must be a whole number from 0 to 90, not 91"),
    ("n", 0, "n must be a whole number from 1 to 128, not 0"),
    ("n", 129, "n must be a whole number from 1 to 128, not 129"),
    ("logprobs", -1, "logprobs must be a whole number from 0 to 20, not -1"),
    ("logprobs", 21, "logprobs must be a whole number from 0 to 20, not 21"),
    ("prompt_logprobs", 21, "prompt_logprobs must be a whole number from 0 to 20, not 21"),
    ("seed", 2**64, "seed must be a 64-bit integer"),
    ("seed", -(2**63) - 1, "seed must be a 64-bit integer"),
    ("logit_bias", {50: 1.0}, "logit_bias: token id 50 is out of the vocabulary [0, 50)"),
    ("logit_bias", {-1: 1.0}, "logit_bias: token id -1 is out of the vocabulary [0, 50)"),
    ("logit_bias", {1: 101.0}, "logit_bias must be a finite number from -100.0 to 100.0"),
    ("logit_bias", {1: math.nan}, "logit_bias must be a finite number"),
    ("stop", ("a",) * 17, "stop has 17 strings, and at most 16 are allowed"),
    ("stop", ("a" * 1025,), "stop has a string of 1025 bytes, and at most 1024 are allowed"),
    ("stop", ("é" * 513,), "stop has a string of 1026 bytes, and at most 1024 are allowed"),
    ("stop_token_ids", (1,) * 257, "stop_token_ids has 257 token ids, and at most 256"),
    ("logit_bias", dict.fromkeys(range(1025), 1.0), "logit_bias has 1025 entries, and at most"),
    ("stop", ("a", ""), "stop must not hold an empty string"),
    ("stop_token_ids", (50,), "stop_token_ids: token id 50 is out of the vocabulary [0, 50)"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_values_out_of_range_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolved(**{name: value})
    assert caught.value.message.startswith(message)
    assert (caught.value.param, caught.value.code) == (name, "invalid_value")


def test_ignore_eos_keeps_only_the_requests_own_stops() -> None:
    assert resolved(ignore_eos=True, stop_token_ids=(5,)).stop_token_ids == (5,)


def test_seeds_are_drawn_anew() -> None:
    assert len({resolved().seed for _ in range(20)}) == 20


@pytest.mark.parametrize("asked", [{"echo": True}, {"prompt_logprobs": 0}])
def test_no_token_is_enough_where_the_answer_tells_of_the_prompt(asked: dict[str, Any]) -> None:
    assert resolved(max_tokens=0, **asked).max_tokens == 0
    with pytest.raises(InvalidRequest, match="of at least 0, not -1"):
        resolved(max_tokens=-1, **asked)


def test_max_tokens_beyond_the_context_gives_both_numbers() -> None:
    with pytest.raises(
        InvalidRequest, match=r"10 tokens and max_tokens 91 .* 100 tokens"
    ) as caught:
        resolved(max_tokens=91)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")


@pytest.mark.parametrize(
    ("ids", "code", "message"),
    [
        ((), "invalid_value", "the prompt is empty"),
        ((1, 50), "invalid_value", r"token id 50 of the prompt is out of the vocabulary \[0, 50\)"),
        ((1, -1), "invalid_value", "token id -1 of the prompt is out of the vocabulary"),
        ((1,) * 100, "context_length_exceeded", "has 100 tokens but the model's context is 100"),
    ],
)
def test_prompts_are_checked(ids: tuple[int, ...], code: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        check_prompt(ids, FACTS)
    assert (caught.value.code, caught.value.param) == (code, "prompt")


def test_the_longest_prompt_leaves_one_token() -> None:
    check_prompt((1,) * 99, FACTS)
    asked = RequestedSampling()
    assert resolve(asked, prompt_tokens=99, defaults=DEFAULTS, facts=FACTS).max_tokens == 1
