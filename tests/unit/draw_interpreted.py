"""The Triton kernel of the draw, interpreted on the CPU, against the rule: run by `test_triton`."""

from __future__ import annotations

import os

import pytest
import torch

from engine.sampling import gumbel, triton_draw
from tests.unit.draw_kit import VOCABS, random_draws, random_logits

assert os.environ.get("TRITON_INTERPRET") == "1", "run by tests/unit/test_triton.py"


@pytest.mark.parametrize("vocab", VOCABS)
def test_tokens_are_those_of_the_rule(vocab: int) -> None:
    draws, logits = random_draws(5, vocab), random_logits(5, vocab, vocab)
    assert torch.equal(triton_draw.draw(logits, draws), gumbel.draw(logits, draws))


def test_the_noise_is_that_of_the_rule_to_the_bit() -> None:
    """Where one id alone can be drawn, at temperature 1, its score is its noise."""
    draws = random_draws(6, 7)
    draws.temperatures[:] = 1.0
    places = torch.tensor([0, 15, 64, 2047, 2048, 4095])
    logits = torch.full((6, 4096), float("-inf"))
    logits[range(6), places] = 0.0
    scores, ids = triton_draw.best_of_pieces(logits, draws)
    pieces = places // 2048
    assert torch.equal(ids[range(6), pieces], places)
    keys = torch.from_numpy(draws.keys.astype("int64"))
    noise = torch.stack([gumbel.noise(key, 4096) for key in keys])
    assert torch.equal(scores[range(6), pieces], noise[range(6), places])
