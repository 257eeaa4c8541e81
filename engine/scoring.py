"""Which of a prompt's tokens a step scores, and at which rows of its logits. Pure.

A token's log probability is told by the logits of the token before it. So all tokens of such a
prompt are computed, also those whose KV is cached.

A step's logits have one row for each slice that samples, then one for each token that is scored;
both in the batch's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, SupportsInt

from engine.step import Scoring, SequenceSlice
from kvrelay.messages import PromptLogprobs
from kvrelay.types import PromptLogprob, RequestSpec


class Rows(Protocol):
    """# slice |-> its last row"""

    def __getitem__(self, index: int, /) -> SupportsInt: ...


MOST_SCORED_TOKENS = 512
"""Of one step. Each takes a row of logits: of a vocabulary of 128,000 ids half a megabyte."""


def is_scored(spec: RequestSpec) -> bool:
    return spec.sampling.prompt_logprobs is not None


def scoring_of(spec: RequestSpec, start: int, end: int) -> Scoring | None:
    """Of a slice `[start, end)`; None: nothing of it is scored."""
    top = spec.sampling.prompt_logprobs
    if top is None:
        return None
    next_ids = spec.prompt_ids[start + 1 : end + 1]
    return Scoring(next_ids=next_ids, top=top) if next_ids else None


def scored_event(
    spec: RequestSpec, end: int, take: int, entries: tuple[PromptLogprob, ...], now_s: float
) -> PromptLogprobs:
    """Of a step that has computed `take` tokens, up to `end`."""
    first = end - take + 1
    return PromptLogprobs(key=spec.key, at_s=now_s, first_position=first, entries=entries)


def scored_rows(slices: Sequence[SequenceSlice], last_rows: Rows) -> list[int]:
    """Whose logits score a token, slice by slice."""
    rows: list[int] = []
    for i, piece in enumerate(slices):
        if piece.scoring is not None:
            first = int(last_rows[i]) - len(piece.token_ids) + 1
            rows += range(first, first + len(piece.scoring.next_ids))
    return rows


def row_owners(slices: Sequence[SequenceSlice], picked: Sequence[int]) -> list[tuple[bool, int]]:
    """Of a step of the `picked` slices alone: whether each row scores, and its slice. Sorted, the
    rows of several such steps are in the order of all."""
    owners = [(False, i) for i in picked if slices[i].samples]
    for i in picked:
        scoring = slices[i].scoring
        owners += [(True, i)] * len(scoring.next_ids if scoring is not None else ())
    return owners
