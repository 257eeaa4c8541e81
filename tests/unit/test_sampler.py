"""The vectorised sampler against a naive one that follows the definitions row by row."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.sampling.truncation
from engine.core.step import Sampled, SampleRequest
from engine.sampling.gumbel import noise
from engine.sampling.parameters import KeptParameters, draws_of
from engine.sampling.sampler import draw, sample
from engine.sampling.truncation import truncate
from kvrelay.types import Sampling

VOCAB = 40


def request(choice: int = 0, **sampling: object) -> SampleRequest:
    defaults: dict[str, object] = {"max_tokens": 9, "seed": 1}
    return SampleRequest(
        sampling=Sampling(**{**defaults, **sampling}),  # type: ignore[arg-type]
        choice=choice,
        prompt_ids=(1, 2, 3),
        emitted_ids=(3, 4, 4),
    )


def penalised(logits: list[float], asked: SampleRequest, index: int = 0) -> list[float]:
    out, s = list(logits), asked.sampling
    for token, bias in s.logit_bias:
        out[token] += bias
    for token in {*asked.prompt_ids, *asked.emitted_ids}:
        p = s.repetition_penalty
        out[token] = out[token] / p if out[token] > 0 else out[token] * p
    for token, count in Counter(asked.emitted_ids).items():
        out[token] -= count * s.frequency_penalty + s.presence_penalty
    if index < s.min_tokens:
        for token in s.stop_token_ids:
            out[token] = -math.inf
    return out


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


def naive(logits: list[float], asked: SampleRequest, index: int) -> tuple[int, float]:
    """The token, and how near the draw was to another one."""
    s = asked.sampling
    logits = penalised(logits, asked, index)
    if s.temperature == 0:
        return max(range(VOCAB), key=lambda t: (logits[t], -t)), 1.0
    likely, margin = kept(logits, s)
    (key,) = draws_of([asked], [index]).keys.astype(np.int64)
    own_noise = noise(torch.from_numpy(key), VOCAB).tolist()
    scores = {t: logits[t] + s.temperature * own_noise[t] for t in likely}
    best = max(likely, key=lambda t: (scores[t], -t))
    others = [scores[t] for t in likely if t != best]
    return best, min(margin, scores[best] - max(others, default=-math.inf))


def kept(logits: list[float], s: Sampling) -> tuple[list[int], float]:
    """What may be drawn, and how far the share of top_p is from a border."""
    chances = softmax([x / s.temperature for x in logits])
    order = sorted(range(VOCAB), key=lambda t: (-chances[t], t))
    kept = order[: s.top_k or VOCAB]
    mass = sum(chances[t] for t in kept)
    margin = 1.0
    if s.top_p < 1:
        before, nucleus = 0.0, []
        for token in kept:
            margin = min(margin, abs(before - s.top_p * mass))
            if before < s.top_p * mass:
                nucleus.append(token)
            before += chances[token]
        kept = nucleus
    return [t for t in kept if chances[t] >= s.min_p * chances[order[0]]] or kept[:1], margin


INDICES = st.integers(0, 5)
SEEDS = st.integers(0, 1000)
SAMPLINGS = st.builds(
    request,
    choice=st.integers(0, 3),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 17, VOCAB]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.6]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.4]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    min_tokens=st.sampled_from([0, 2]),
    stop_token_ids=st.sampled_from([(), (5, 6)]),
    logit_bias=st.sampled_from([(), ((7, 3.0), (8, -100.0))]),
)


def random_logits(rows: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


@settings(max_examples=300)
@given(draws=st.lists(st.tuples(SAMPLINGS, INDICES), min_size=1, max_size=6), seed=SEEDS)
def test_equals_the_naive_sampler(draws: list[tuple[SampleRequest, int]], seed: int) -> None:
    logits = random_logits(len(draws), seed)
    found = sample(logits, [(one,) for one, _ in draws], [index for _, index in draws])
    for row, (asked, index), (got,) in zip(logits.tolist(), draws, found, strict=True):
        expected, margin = naive(row, asked, index)
        assert got.token_id == expected or margin < 1e-5


@settings(max_examples=200)
@given(wanted=st.lists(SAMPLINGS, min_size=1, max_size=4), seed=SEEDS)
def test_the_short_way_equals_the_full_sort(wanted: list[SampleRequest], seed: int) -> None:
    """Most truncations rank the most likely ids only; equal probabilities must not matter."""
    logits = random_logits(len(wanted), seed, scale=1.0).round()  # many ties
    draws = draws_of(wanted, range(len(wanted)))
    full = truncate(logits, draws)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.sampling.truncation, "_HEAD", 6)
        assert torch.equal(truncate(logits, draws), full)


@given(draws=st.lists(st.tuples(SAMPLINGS, INDICES), min_size=2, max_size=6), seed=SEEDS)
@settings(max_examples=50)
def test_a_row_does_not_depend_on_its_batch(
    draws: list[tuple[SampleRequest, int]], seed: int
) -> None:
    logits = random_logits(len(draws), seed)
    together = sample(logits, [(one,) for one, _ in draws], [index for _, index in draws])
    alone = [sample(logits[i : i + 1], [(one,)], [n])[0] for i, (one, n) in enumerate(draws)]
    assert together == alone


def test_choices_of_one_prompt_differ_and_share_logits() -> None:
    logits = random_logits(2, 1, scale=0.1)
    choices = tuple(request(choice=c, temperature=1.0) for c in range(8))
    found = sample(logits, [(request(),), choices], [3, 2])
    assert len(found[1]) == 8
    assert len({one.token_id for one in found[1]}) > 4
    alone = [sample(logits[1:], [(choice,)], [2])[0][0] for choice in choices]
    assert list(found[1]) == alone


def test_logprobs_come_after_penalties_and_before_temperature() -> None:
    logits = random_logits(1, 2)
    asked = request(temperature=0.5, top_k=1, repetition_penalty=1.5, logprobs=3)
    (got,) = sample(logits, [(asked,)], [0])[0]
    chances = softmax(penalised(logits[0].tolist(), asked))
    best = sorted(range(VOCAB), key=lambda t: -chances[t])[:3]
    assert got.logprobs is not None
    assert [token for token, _ in got.logprobs.top] == best
    assert got.logprobs.token_id == got.token_id == best[0]
    for token, logprob in got.logprobs.top:
        assert logprob == pytest.approx(math.log(chances[token]), abs=1e-4)


def test_logprobs_only_for_those_who_ask() -> None:
    logits = random_logits(3, 2)
    rows = [(request(),), (request(logprobs=0),), (request(logprobs=2),)]
    plain, zero, two = (row[0] for row in sample(logits, rows, [0, 0, 0]))
    assert plain == Sampled(token_id=plain.token_id)
    assert zero.logprobs is not None
    assert zero.logprobs.top == ()
    assert two.logprobs is not None
    assert len(two.logprobs.top) == 2


def test_the_logits_are_left_alone() -> None:
    logits = random_logits(1, 4)
    before = logits.clone()
    sample(logits, [(request(repetition_penalty=2.0, temperature=1.0),)], [0])
    assert torch.equal(logits, before)


def test_masked_ids_are_no_alternatives() -> None:
    logits = torch.full((1, VOCAB), 0.0)
    stop = tuple(range(2, VOCAB))
    asked = request(logprobs=5, min_tokens=1, stop_token_ids=stop)
    (got,) = sample(logits, [(asked,)], [0])[0]
    assert got.logprobs is not None
    assert sorted(token for token, _ in got.logprobs.top) == [0, 1]
    assert np.isclose(got.logprobs.logprob, math.log(0.5))


def test_parameters_are_kept_while_the_same_requests_draw() -> None:
    kept = KeptParameters()
    first = [request(seed=3, temperature=1.0), request(seed=4, choice=1, top_k=2)]
    second = [replace(one, emitted_ids=(*one.emitted_ids, 5)) for one in first]
    before = kept.of(first)
    assert kept.of(second) is before
    assert before.draws([1, 2]).keys.tolist() == [[3, 0, 0, 1], [4, 0, 1, 2]]
    assert before.draws([0, 0]).keys.tolist() == [[3, 0, 0, 0], [4, 0, 1, 0]]


@pytest.mark.parametrize("changed", [{"seed": 5}, {"choice": 2}, {"top_k": 3}])
def test_other_requests_have_other_parameters(changed: dict[str, int]) -> None:
    kept = KeptParameters()
    kept.of([request(seed=3, temperature=1.0), request(seed=4, temperature=1.0)])
    now = [request(seed=3, temperature=1.0), request(**{"seed": 4, "temperature": 1.0} | changed)]
    found, expected = kept.of(now).draws([5, 6]), draws_of(now, [5, 6])
    assert found.keys.tolist() == expected.keys.tolist()
    assert found.cuts.tolist() == expected.cuts.tolist()


@pytest.mark.parametrize(
    ("asked", "token_id"),
    [
        ({}, 3),
        ({"repetition_penalty": 9.0}, 5),
        ({"logit_bias": ((7, 5.0),)}, 7),
        ({"min_tokens": 1, "stop_token_ids": (3,)}, 5),
        ({"logprobs": 0}, 3),
    ],
)
def test_what_applies_is_seen_after_steps_without_it(
    asked: dict[str, object], token_id: int
) -> None:
    kept, logits = KeptParameters(), torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 5] = 1.0, 0.5
    (before,) = draw(logits, [[request()]], [0], kept=kept).sampled()[0]
    now = request(**asked)  # type: ignore[arg-type]
    (after,) = draw(logits, [[now]], [0], kept=kept).sampled()[0]
    assert before.token_id == 3 and before.logprobs is None
    assert after.token_id == token_id and (after.logprobs is None) == ("logprobs" not in asked)
