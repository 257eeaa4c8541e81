"""top_k, top_p and min_p: which ids may be drawn. Runs in the worker.

Ids are ranked by logit, equal ones by id. top_k keeps the first k of them. top_p keeps of these the
first ids whose probabilities, at the row's temperature, reach its share of the sum. min_p keeps of
these the ids with at least its share of the largest probability. `truncation.h` does the same.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.device.streams import send
from engine.sampling.gumbel import Draws

_HEAD = 1024
"""On a CPU this many ids are ranked first; if they don't decide which ids are kept, all are."""


def truncate(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """`logits` fp32 `[rows, vocab]`, unchanged. If any id is cut, a copy is returned, with -inf for
    cut ids."""
    is_cut = (draws.cuts != (0.0, 1.0, 0.0)).any(axis=1) & (draws.temperatures > 0)
    if not is_cut.any():
        return logits
    rows = send(np.flatnonzero(is_cut).tolist(), torch.long, logits.device)
    temperatures = send(draws.temperatures[is_cut], torch.float32, logits.device)[:, None]
    cuts = send(draws.cuts[is_cut], torch.float32, logits.device)
    return logits.index_copy(0, rows, _kept_of(logits[rows], temperatures, cuts))


def _kept_of(logits: torch.Tensor, temperatures: torch.Tensor, cuts: torch.Tensor) -> torch.Tensor:
    largest = logits.amax(dim=-1, keepdim=True)
    probabilities = torch.softmax((logits - largest) / temperatures, dim=-1)
    if logits.device.type != "cpu" or logits.shape[1] <= _HEAD:
        return _masked(logits, *_rank_all(logits, probabilities, cuts))
    ids, kept, is_settled = _rank_head(logits, probabilities, cuts)
    found = _masked(logits, ids, kept)
    if not is_settled.all():
        rows = ~is_settled
        ranked = _rank_all(logits[rows], probabilities[rows], cuts[rows])
        found[rows] = _masked(logits[rows], *ranked)
    return found


def _masked(logits: torch.Tensor, ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Keeps the first `kept` (`[rows, 1]`) of the ranked `ids`."""
    stays = torch.arange(ids.shape[1], device=ids.device) < kept
    values = torch.where(stays, logits.gather(1, ids), float("-inf"))
    return torch.full_like(logits, float("-inf")).scatter_(1, ids, values)


def _rank_all(
    logits: torch.Tensor, probabilities: torch.Tensor, cuts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """All ids in their order, and the number of kept ones."""
    ids = logits.sort(dim=-1, descending=True, stable=True).indices
    return ids, _kept(probabilities.gather(1, ids), cuts)


def _rank_head(
    logits: torch.Tensor, probabilities: torch.Tensor, cuts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Like `_rank_all`, for the largest logits; and the rows for which these are enough.

    `topk` breaks ties in any order, so ids with the last one's logit are not certain.
    """
    ids = logits.topk(_HEAD, dim=-1, sorted=False).indices.sort(dim=-1).values
    ranked, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    kept = _kept(probabilities.gather(1, ids), cuts)
    certain = (ranked > ranked[:, -1:]).sum(dim=-1, keepdim=True)
    return ids, kept, ((kept <= certain) & (cuts[:, :1] <= _HEAD))[:, 0]


def _kept(ranked: torch.Tensor, cuts: torch.Tensor) -> torch.Tensor:
    """The number of kept ids among the ranked probabilities: `[rows, 1]`, at least 1."""
    width = ranked.shape[1]
    top_k, top_p, min_p = cuts.split(1, dim=1)
    totals = ranked.cumsum(dim=-1)
    limits = torch.where(top_k > 0, top_k, width).clamp_max(width).long()
    mass = torch.where(top_k > 0, totals.gather(1, limits - 1), 1.0)
    share = torch.where(top_p < 1, top_p * mass, float("inf"))
    stays = (totals - ranked < share) & (ranked >= min_p * ranked[:, :1])
    return stays.sum(dim=-1, keepdim=True).minimum(limits).clamp_min(1)
