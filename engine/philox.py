"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11, "Parallel Random Numbers: As
Easy as 1, 2, 3", §3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Words = torch.Tensor
"""int64, of 32-bit words."""

_ROUNDS = 10
_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: Sequence[Words], key: Sequence[Words]) -> tuple[Words, ...]:
    """Four words for each counter. `counter` is four tensors and `key` two that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        (high0, low0), (high1, low1) = _times(c0, _MULTIPLIERS[0]), _times(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def _times(words: Words, factor: int) -> tuple[Words, Words]:
    """The high and the low word of each product, which may wrap around as a signed number."""
    product = words * factor
    return (product >> 32) & _LOW, product & _LOW
