"""What is told of a step's logits beside the tokens drawn from them. Runs in the worker."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.step import SequenceSlice
from kvpool.canary import SKETCH_TOKENS, LogitSketch


@torch.inference_mode()
def sketches(
    logits: torch.Tensor, slices: Sequence[SequenceSlice], bound: float
) -> dict[int, LogitSketch]:
    """# slice |-> its logits' sketch, where one is wanted

    `logits` fp32 `[slices that sample, vocab]`.
    """
    sampling = [i for i, piece in enumerate(slices) if piece.samples]
    wanted = [(i, slices[i].sketch_ids) for i in sampling]
    rows = zip(wanted, logits, strict=True)
    return {i: _sketch(row, ids, bound) for (i, ids), row in rows if ids is not None}


def _sketch(logits: torch.Tensor, token_ids: tuple[int, ...], bound: float) -> LogitSketch:
    if token_ids:
        known = [token for token in token_ids if token < len(logits)]
        picked = torch.tensor(known, dtype=torch.long, device=logits.device)
    else:
        picked = logits.topk(min(SKETCH_TOKENS, len(logits))).indices
    whole = torch.stack([logits.logsumexp(0), logits.std(correction=0)])
    *values, log_sum_exp, spread = torch.cat([logits[picked], whole]).tolist()
    return LogitSketch(
        token_ids=tuple(picked.tolist()),
        logits=tuple(values),
        log_sum_exp=log_sum_exp,
        spread=spread,
        bound=bound,
    )
