"""The rule by which a token is drawn: the first id of the largest logit + temperature x noise.

The noise is Gumbel's, -log(-log(u)), so an id is drawn with its probability in softmax(logits /
temperature) (Gumbel, 1954; "Gumbel-max"). It depends on (seed, choice, index, id) alone. A change
of the logits by little moves few draws: only those whose two best scores are nearly equal. An
inverse CDF would move every border between two ids.

This is the rule in torch's operations. `draw.cpp` and `triton_draw.py` give
the same bits, so each product and each sum is rounded by itself, in this order.

Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11, "Parallel Random Numbers: As
Easy as 1, 2, 3", §3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.device.streams import send

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


BLOCKS = 16
"""Counters of a group. Word w of its counter b is the noise of the group's id 16 w + b, so 16
consecutive ids are the same word of 16 counters."""
GROUP = 4 * BLOCKS

LOG_TAIL = (
    0.08700364083051682,
    -0.14267493784427643,
    0.1491478979587555,
    -0.1657758355140686,
    0.19963061809539795,
    -0.2500133812427521,
    0.3333390951156616,
)
"""(log(1 + r) - r + r^2 / 2) / r^3 for r within [sqrt(1/2) - 1, sqrt(2) - 1], highest power first.
Fitted by weighted least squares; log(1 + r) is off by 3.2e-8 of itself at most."""
LN2_HIGH, LN2_LOW = 0.693359375, -0.00021219444170128554
"""The high part has few bits, so that its product with an exponent is exact."""
_SQRT_HALF = 0x3F3504F3
_HALVES = 0x7FFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """The inputs of some rows' draws beside their logits."""

    keys: NDArray[np.uint32]  # [rows, 4]: seed's low and high word, choice, index
    temperatures: NDArray[np.float32]  # [rows]; 0: the most likely id
    cuts: NDArray[np.float32]  # [rows, 3]: top_k, top_p, min_p; 0, 1, 0: nothing is cut


def draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Token ids `[rows]` from `logits` fp32 `[rows, vocab]`, row by row, because noise takes
    memory.

    Logits of ids that are cut are -inf already.
    """
    keys = send(draws.keys.astype(np.int64), torch.long, logits.device)
    temperatures = send(draws.temperatures, torch.float32, logits.device)
    rows = zip(logits, keys, temperatures, strict=True)
    return torch.stack([(row + noise(key, len(row)) * t).argmax() for row, key, t in rows])


def noise(key: torch.Tensor, vocab: int) -> torch.Tensor:
    """fp32 `[vocab]`; `key` int64 `[4]` as in `Draws`."""
    groups = -(-vocab // GROUP)
    blocks = torch.arange(groups * BLOCKS, device=key.device)
    seed_low, seed_high, choice, index = key.unbind()
    counter = (blocks, index, choice, torch.zeros_like(index))
    words = torch.stack(philox4x32(counter, (seed_low, seed_high)))  # [4, blocks]
    by_id = words.view(4, groups, BLOCKS).transpose(0, 1).reshape(-1)
    return gumbel(by_id[:vocab])


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """For 32-bit words in int64; the highest 31 bits of each count."""
    halves = words >> 1
    near = _uniform(halves)
    r, exponent = _parts(_uniform(_HALVES - halves))  # of 1 - near, which must not be rounded
    is_near = near < 0.25
    r, exponent = torch.where(is_near, -near, r), torch.where(is_near, 0.0, exponent)
    return -_log(*_parts(-_log(r, exponent)))


def _uniform(halves: torch.Tensor) -> torch.Tensor:
    """The middle of one of 2^31 parts of [0, 1]."""
    return (halves.float() + 0.5) * 2.0**-31


def _parts(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """r and e with value = (1 + r) 2^e and r in the reach of `_log`."""
    bits = values.view(torch.int32)
    exponent = (bits - _SQRT_HALF) >> 23
    return (bits - (exponent << 23)).view(torch.float32) - 1.0, exponent.float()


def _log(r: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    square = r * r
    tail = torch.full_like(r, LOG_TAIL[0])
    for factor in LOG_TAIL[1:]:
        tail = tail * r + factor
    tail = tail * r * square + exponent * LN2_LOW
    return (r + (tail - square * 0.5)) + exponent * LN2_HIGH
