"""Rounds a step's number of tokens up to one of few, because oneDNN makes code for each number.

That takes it some milliseconds for each kind of product, and it keeps the last thousand only. What
is computed for the tokens that are added is never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from engine.attention import AttentionState, Scores, attention_state, current_state
from engine.compiled.capture import Forward

_STEPS = ((16, 1), (64, 4), (512, 16))
"""Up to so many tokens: multiples of so many."""
_LARGE = 64


def rounded(tokens: int) -> int:
    size = next((size for most, size in _STEPS if tokens <= most), _LARGE)
    return -(-tokens // size) * size


def sizes(most: int) -> list[int]:
    """Of steps of up to `most` tokens."""
    return sorted({rounded(tokens) for tokens in range(1, most + 1)})


def padded(forward: Forward) -> Forward:
    """`forward` for any number of tokens and of rows."""

    def run(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        tokens, wanted = ids.shape[1], rows.shape[0]
        rows = pad(rows, (0, rounded(wanted) - wanted))
        more = rounded(tokens) - tokens
        if not more:
            return forward(ids, positions, rows)[:wanted]
        with attention_state(_Unpadded(current_state(), tokens, more)):
            return forward(pad(ids, (0, more)), pad(positions, (0, more)), rows)[:wanted]

    return run


@dataclass(frozen=True, slots=True)
class _Unpadded:
    """Implements AttentionState: `state` sees the step's own tokens alone."""

    state: AttentionState
    tokens: int
    more: int

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        query, key, value = (one.narrow(2, 0, self.tokens) for one in (query, key, value))
        out = self.state.attend(layer, query, key, value, scores)
        return pad(out, (0, 0, 0, 0, 0, self.more))
