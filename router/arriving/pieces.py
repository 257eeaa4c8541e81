"""How far what has come of a prompt is computed ahead. Pure; the simulator goes by it too."""

from __future__ import annotations

from kvrelay.types import Sampling

LEAST_TOKENS = 128
"""A shorter addition is not worth a request of its own."""
MOST_TOKENS = 2048
"""Of one request ahead: what comes after it must not wait long for it."""
SETTLE_S = 1.0
"""The whole prompt waits so long for the request ahead that runs. What this computes need not be
computed again."""
REFUSED_S = 1.0
"""After a refusal without a time."""
PROMPT_ONLY = Sampling(max_tokens=0, seed=0)


def next_tokens(known: int, computed: int, block: int) -> int:
    """How far the next request goes, in whole blocks; 0: not enough has come."""
    whole = min(known, computed + MOST_TOKENS) // block * block if block else 0
    return whole if whole - computed >= max(LEAST_TOKENS, block) else 0
