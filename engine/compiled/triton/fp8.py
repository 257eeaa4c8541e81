"""Rows of activations become FP8 by a Triton kernel, on the caller's current stream. Runs in the
worker."""

from __future__ import annotations

import torch
import triton

from engine.compiled.triton.kernels import scale_rows

_WIDE = 16_384
"""A program keeps a row of up to this many numbers in its registers."""


def rows_to_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows` `[rows, width]` as e4m3, and the scale of each, fp32 `[rows, 1]`."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    count, width = rows.shape
    values = torch.empty(count, width, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(count, 1, dtype=torch.float32, device=rows.device)
    tile = min(_WIDE, triton.next_power_of_2(width))
    scale_rows[(count,)](
        *(rows, values, scales, rows.stride(0)),
        WIDTH=width,
        TILE=tile,
        num_warps=max(1, min(16, tile // 256)),
    )
    return values, scales
