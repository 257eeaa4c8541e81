"""Whether KV that was handed over yields the logits that its maker saw: which requests are checked,
what of the logits travels with the commit, and how far apart two of them are. Pure; both workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from math import inf, isfinite

SKETCH_TOKENS = 16
"""The most likely tokens are the ones that wrong KV must not change; the log-sum-exp stands for the
rest. Together 144 bytes, in a message of at most 64 KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitSketch:
    """Of one position's fp32 logits `[vocab]`: those of `token_ids`, the log-sum-exp of all, and
    their standard deviation `spread`, the unit of distances: an error of the last hidden state
    changes each logit by about its relative size times this. `bound` is its maker's own: the
    larger one of two workers' holds."""

    token_ids: tuple[int, ...]
    logits: tuple[float, ...]
    log_sum_exp: float
    spread: float
    bound: float = 0.0

    def distance(self, other: LogitSketch) -> float:
        """The largest difference, in spreads of this one. Infinite where a number isn't finite or
        the tokens differ."""
        mine, theirs = (*self.logits, self.log_sum_exp), (*other.logits, other.log_sum_exp)
        known = all(map(isfinite, (*mine, *theirs, self.spread)))
        same = self.token_ids == other.token_ids and len(mine) == len(theirs)
        if not (known and same):
            return inf
        furthest = max(abs(a - b) for a, b in zip(mine, theirs, strict=True))
        return furthest / max(self.spread, 1e-9)


def is_chosen(request_id: str, every: int) -> bool:
    """One request in `every` (0: none), all tries of it alike: the rerun of one that failed its
    check is checked again. Both workers choose, by the same `every`."""
    if every == 0:
        return False
    digest = blake2b(request_id.encode(), digest_size=8, person=b"kvrelay-canary").digest()
    return int.from_bytes(digest, "little") % every == 0


def first_query(prompt_tokens: int, *, checked: bool) -> int:
    """The first position whose query is still to come on the decode worker: what it sees is handed
    over."""
    return prompt_tokens - checked
