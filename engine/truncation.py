"""top_k, top_p and min_p: which ids may be drawn. Runs in the worker.

Ids are ranked by probability at the request's temperature, equal ones by id. top_k keeps the first
of them, top_p of these the first whose probabilities reach its share of theirs, and min_p of these
those of at least its share of the largest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.sending import send
from engine.step import SampleRequest
from kvrelay.types import Sampling

_HEAD = 1024
"""On a CPU so many ids are ranked first; where they don't settle what is kept, all are."""


def truncate(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """`logits` fp32 `[requests, vocab]`, unchanged; in the copy that is returned where anything is
    cut, what is cut is -inf."""
    cut = [i for i, request in enumerate(requests) if _cuts(request.sampling)]
    if not cut:
        return logits
    samplings = [requests[i].sampling for i in cut]
    if len(cut) == len(requests):
        return _kept_of(logits, samplings)
    rows = send(cut, torch.long, logits.device)
    return logits.index_copy(0, rows, _kept_of(logits[rows], samplings))


def _cuts(sampling: Sampling) -> bool:
    keeps_all = sampling.top_k == 0 and sampling.top_p >= 1.0 and sampling.min_p == 0.0
    return sampling.temperature > 0 and not keeps_all


def _kept_of(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    temperatures = _column([s.temperature for s in samplings], logits)
    largest = logits.amax(dim=-1, keepdim=True)
    probabilities = torch.softmax((logits - largest) / temperatures, dim=-1)
    vocab = logits.shape[1]
    if logits.device.type != "cpu" or vocab <= _HEAD:
        return _masked(logits, *_rank_all(probabilities, samplings))
    ids, kept, is_settled = _rank_head(probabilities, samplings)
    found = _masked(logits, ids, kept)
    if not is_settled.all():
        rows = (~is_settled).nonzero()[:, 0]
        others = [samplings[row] for row in rows.tolist()]
        found[rows] = _masked(logits[rows], *_rank_all(probabilities[rows], others))
    return found


def _masked(logits: torch.Tensor, ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Of the ranked `ids` the first `kept` (`[rows, 1]`) stay."""
    stays = torch.arange(ids.shape[1], device=ids.device) < kept
    values = torch.where(stays, logits.gather(1, ids), float("-inf"))
    return torch.full_like(logits, float("-inf")).scatter_(1, ids, values)


def _rank_all(
    probabilities: torch.Tensor, samplings: Sequence[Sampling]
) -> tuple[torch.Tensor, torch.Tensor]:
    """All ids in their order, and how many of them are kept."""
    ranked, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    return ids, _kept(ranked, samplings)


def _rank_head(
    probabilities: torch.Tensor, samplings: Sequence[Sampling]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `_rank_all`, of the most likely ids; and for which rows these are enough.

    `topk` breaks ties as it likes, so ids as likely as the last one are not certain.
    """
    ids = probabilities.topk(_HEAD, dim=-1, sorted=False).indices.sort(dim=-1).values
    ranked, order = probabilities.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    kept = _kept(ranked, samplings)
    certain = (ranked > ranked[:, -1:]).sum(dim=-1, keepdim=True)
    is_beyond = _column([float(s.top_k > _HEAD) for s in samplings], ranked).bool()
    return ids.gather(1, order), kept, ((kept <= certain) & ~is_beyond)[:, 0]


def _kept(ranked: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """How many of the ranked ids are kept: `[rows, 1]`, at least 1."""
    width = ranked.shape[1]
    totals = ranked.cumsum(dim=-1)
    limits = _column([min(s.top_k or width, width) for s in samplings], ranked).long()
    by_k = totals.gather(1, limits - 1)
    unlimited = _column([float(s.top_k == 0) for s in samplings], ranked).bool()
    mass = torch.where(unlimited, torch.ones_like(by_k), by_k)
    top_p = _column([s.top_p if s.top_p < 1.0 else float("inf") for s in samplings], ranked)
    min_p = _column([s.min_p for s in samplings], ranked)
    stays = (totals - ranked < top_p * mass) & (ranked >= min_p * ranked[:, :1])
    return stays.sum(dim=-1, keepdim=True).minimum(limits).clamp_min(1)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return send(values, torch.float32, like.device)[:, None]
