"""Structured output on a CUDA device: a grammar leaves the same ids as on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.sampling.grammars import Masks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("vocab", [500, 32_000, 128_256])
def test_masks_are_those_of_the_cpu(vocab: int) -> None:
    draw = np.random.default_rng(vocab)
    words = -(-vocab // 32)
    allowed = draw.integers(-(2**31), 2**31, size=(3, words), dtype=np.int64).astype(np.int32)
    masks = Masks(
        rows=(0, 2, 3), allowed=allowed, exhausted=frozenset(), eos_ids=frozenset(), failed={}
    )
    flat = ((0,), (1,), (2, 3), (4,))
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(1))
    found = masks.applied(logits.cuda(), flat).cpu()
    assert torch.equal(found, masks.applied(logits, flat))
    assert torch.equal(found[1], logits[1])
    assert 0 < int(found[0].isinf().sum()) < vocab
