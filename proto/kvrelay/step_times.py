"""How long a worker's steps take, as the coefficients that it tells. Pure.

`engine.latency_fit` computes with them; `engine.time_profile` measures them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf

SCALARS = (
    "prefill_overhead_s",
    "prefill_token_s",
    "prefill_pair_s",
    "prefill_sequence_s",
    "decode_kv_token_s",
    "error",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCoefficients:
    """Of prefill: each step, each new token, each pair of a new token and one that it sees, each
    sequence. Of decode: a step without KV at some numbers of sequences (linear between these), and
    each token of context. `error` is the median relative error in steps that were not fitted.

    Raises ValueError, naming the field, for what no step can take.
    """

    prefill_overhead_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_pair_s: float = 0.0
    prefill_sequence_s: float = 0.0
    decode_knots: tuple[tuple[int, float], ...] = ()
    decode_kv_token_s: float = 0.0
    error: float = 0.0

    def __post_init__(self) -> None:
        for name in SCALARS:
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name}: a number that is not negative")
        if not all(sequences > 0 and 0 <= s < inf for sequences, s in self.decode_knots):
            raise ValueError("decode_knots: pairs of at least 1 sequence and seconds")
        if any(few[0] >= more[0] for few, more in pairwise(self.decode_knots)):
            raise ValueError("decode_knots: ascending numbers of sequences")
