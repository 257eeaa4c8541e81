"""Random draws for the tests of every way to make them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling.gumbel import Draws

VOCABS = (1, 40, 64, 65, 130, 2049, 5000)


def random_draws(rows: int, seed: int) -> Draws:
    """Greedy ones among them, and the largest numbers that a counter has."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 2**32, (rows, 4), dtype=np.uint64).astype(np.uint32)
    keys[0] = 0
    keys[-1] = 0xFFFFFFFF
    temperatures = rng.choice([0.0, 1e-4, 0.3, 1.0, 2.0, 50.0], rows).astype(np.float32)
    return Draws(keys=keys, temperatures=temperatures, cuts=no_cuts(rows))


def no_cuts(rows: int) -> NDArray[np.float32]:
    return np.tile(np.array([0, 1, 0], dtype=np.float32), (rows, 1))


def random_cuts(rows: int, vocab: int, seed: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    top_k = rng.choice([0, 0, 1, 3, 50, vocab, vocab + 7], rows)
    top_p = rng.choice([1, 1, 0.9, 0.5, 0.999, 0.01], rows)
    min_p = rng.choice([0, 0, 0.05, 0.6, 1], rows)
    return np.stack([top_k, top_p, min_p], axis=1).astype(np.float32)


def random_logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Rows with many equal logits and rows with few ids that can be drawn among them."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 4
    logits[::3] = logits[::3].round()
    logits[1::3, : vocab // 2] = float("-inf")
    return logits
