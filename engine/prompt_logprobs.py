"""Log probabilities of a prompt's tokens, from the logits before them. Runs in the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.sending import fetch, send
from engine.step import Scoring, SequenceSlice
from kvrelay.types import PromptLogprob

_ROWS = 64
"""So many distributions are made at a time: together they take as much as the logits."""


@dataclass(frozen=True, slots=True)
class Scored:
    """On the host once the device has come to where they were made."""

    wanted: list[tuple[int, Scoring]]  # slice, what it scores
    own: torch.Tensor  # [rows]
    ranks: torch.Tensor  # [rows]
    ids: torch.Tensor  # [rows, widest], most likely first
    values: torch.Tensor

    def told(self) -> dict[int, tuple[PromptLogprob, ...]]:
        """# slice |-> one for each token scored"""
        found = (self.own.tolist(), self.ranks.tolist(), self.ids.tolist(), self.values.tolist())
        rows = zip(*found, strict=True)
        return {
            i: tuple([_entry(token, scoring.top, *next(rows)) for token in scoring.next_ids])
            for i, scoring in self.wanted
        }


def _entry(
    token: int, top: int, own: float, rank: int, ids: list[int], values: list[float]
) -> PromptLogprob:
    return PromptLogprob(token, own, rank, tuple(zip(ids[:top], values[:top], strict=True)))


@torch.inference_mode()
def score(logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> Scored | None:
    """`logits` fp32 `[tokens scored, vocab]`, slice by slice; None: nothing is scored."""
    wanted = [(i, piece.scoring) for i, piece in enumerate(slices) if piece.scoring is not None]
    if not wanted:
        return None
    next_ids = [token for _, scoring in wanted for token in scoring.next_ids]
    tokens = send(next_ids, torch.long, logits.device)
    widest = min(max(scoring.top for _, scoring in wanted), logits.shape[1])
    pairs = zip(logits.split(_ROWS), tokens.split(_ROWS), strict=True)
    parts = [_part(rows, known, widest) for rows, known in pairs]
    return Scored(wanted, *(fetch(torch.cat(part)) for part in zip(*parts, strict=True)))


def _part(
    logits: torch.Tensor, tokens: torch.Tensor, widest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    logs = torch.log_softmax(logits, dim=-1)
    own = logs.gather(1, tokens[:, None])
    ranks = (logs > own).sum(dim=-1) + 1
    values, ids = logs.topk(widest, dim=-1)
    return own[:, 0], ranks, ids, values
