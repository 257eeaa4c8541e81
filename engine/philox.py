"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11, "Parallel Random Numbers: As
Easy as 1, 2, 3", §3). The draw of a token depends on (seed, choice, index) alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
"""32-bit words, held in 64 bits so that products don't overflow."""

_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))


def philox4x32(counter: Sequence[Words], key: Sequence[Words]) -> tuple[Words, ...]:
    """Four words for each lane. `counter` is four arrays `[lanes]`, `key` two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        wide0, wide1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (wide1 >> _SHIFT) ^ c1 ^ k0,
            wide1 & _LOW,
            (wide0 >> _SHIFT) ^ c3 ^ k1,
            wide0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(draws: Sequence[tuple[int, int, int]]) -> NDArray[np.float32]:
    """One number in [0, 1), of 24 bits, for each (seed, choice, index); seeds count modulo 2^64."""
    seeds = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed, _, _ in draws], dtype=np.uint64)
    choices = np.array([choice for _, choice, _ in draws], dtype=np.uint64)
    indices = np.array([index for _, _, index in draws], dtype=np.uint64)
    zeros = np.zeros_like(seeds)
    words = philox4x32((indices, choices, zeros, zeros), (seeds & _LOW, seeds >> _SHIFT))
    return ((words[0] >> np.uint64(8)).astype(np.float64) * 2.0**-24).astype(np.float32)
