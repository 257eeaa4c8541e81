"""The draw on a CUDA device is that on a CPU, and what it costs."""

from __future__ import annotations

import pytest
import torch

from engine.sampling import gumbel
from tests.unit.draw_kit import VOCABS, random_draws, random_logits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("vocab", [*VOCABS, 128_256])
def test_tokens_are_those_of_the_rule(vocab: int) -> None:
    from engine.sampling import triton_draw

    for seed in range(5):
        draws, logits = random_draws(9, seed), random_logits(9, vocab, seed)
        expected = gumbel.draw(logits, draws)
        assert torch.equal(triton_draw.draw(logits.cuda(), draws).cpu(), expected)
        assert torch.equal(gumbel.draw(logits.cuda(), draws).cpu(), expected)
