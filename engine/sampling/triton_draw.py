"""Draws tokens on a CUDA device, on the caller's stream: the same bits as `engine.sampling.gumbel`.

Imported only when used: PyTorch for CUDA installs Triton with it. Runs in the worker.
"""

from __future__ import annotations

import numpy as np
import torch
import triton

from engine.device.streams import send
from engine.sampling.gumbel import BLOCKS, GROUP, Draws
from engine.sampling.triton_draw_kernel import draw_pieces

TILE = {"COUNTERS": 512, "BLOCKS": BLOCKS, "GROUP": GROUP}
"""A program has this many counters and scores four ids of each."""
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Like `engine.sampling.gumbel.draw`."""
    scores, ids = best_of_pieces(logits, draws)
    return ids.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]


def best_of_pieces(logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """The best score of each piece of a row and its id, `[rows, pieces]`."""
    rows, vocab = logits.shape
    keys = send(draws.keys.view(np.int32), torch.int32, logits.device)
    temperatures = send(draws.temperatures, torch.float32, logits.device)
    pieces = triton.cdiv(vocab, 4 * TILE["COUNTERS"])
    scores = logits.new_empty((rows, pieces))
    ids = torch.empty((rows, pieces), dtype=torch.long, device=logits.device)
    draw_pieces[(rows, pieces)](
        logits.contiguous(), keys, temperatures, scores, ids, vocab, **TILE, **OPTIONS
    )
    return scores, ids
