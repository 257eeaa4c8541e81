"""The operations of a captured graph by Triton kernels, on the caller's current stream. Runs in the
worker.

Imported only where it is used: PyTorch for CUDA brings Triton along.
"""

from __future__ import annotations

import torch
import triton

from engine.attention.triton.launch import ROTATED, ROUNDED
from engine.compiled.triton.kernels import gate_rows, norm_rows, rotate_heads

_GATED = 1024


def runs_on(device: torch.device) -> bool:
    """On a CPU only interpreted, for tests."""
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)


class TritonOperations:
    """Implements Operations on CUDA tensors of any floating dtype."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, rounds: bool
    ) -> torch.Tensor:
        shape, strides = x.shape, x.stride()
        heads, head_stride = (shape[2], strides[2]) if len(shape) == 4 else (1, 0)
        out = x.new_empty(shape)
        norm_rows[(shape[1] * heads,)](
            *(x, x, weight, out, out, heads, strides[1], head_stride, eps),
            ADDS=False,
            ROUNDS=rounds,
            **_row(shape[-1]),
        )
        return out

    def add_rms_norm(
        self,
        x: torch.Tensor,
        other: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        rounds: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = x.shape
        total, out = x.new_empty(shape), x.new_empty(shape)
        norm_rows[(shape[1],)](
            *(x, other, weight, total, out, 1, shape[2], 0, eps),
            ADDS=True,
            ROUNDS=rounds,
            **_row(shape[2]),
        )
        return total, out

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        _, heads, tokens, dim = x.shape
        strides = x.stride()
        out = x.new_empty((1, tokens, heads, dim))
        tile = triton.next_power_of_2(dim // 2)
        at_once = min(triton.next_power_of_2(heads), max(1, ROTATED // tile))
        rotate_heads[(tokens, triton.cdiv(heads, at_once))](
            *(x, cos, sin, out, heads, strides[2], strides[1], cos.stride(2)),
            HALF=dim // 2,
            HALF_TILE=tile,
            HEADS=at_once,
            num_warps=4,
            **ROUNDED,
        )
        return out.transpose(1, 2)

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return _gated(gate, up, is_gelu=False)

    def gelu_tanh_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return _gated(gate, up, is_gelu=True)


def _row(width: int) -> dict[str, int]:
    """16 bytes for each thread of a program that has a row of this width."""
    tile = triton.next_power_of_2(width)
    return {"WIDTH": width, "TILE": tile, "num_warps": max(1, min(16, tile // 256))}


def _gated(gate: torch.Tensor, up: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    _, tokens, width = gate.shape
    out = gate.new_empty(gate.shape)
    gate_rows[(tokens, triton.cdiv(width, _GATED))](
        *(gate, up, out, gate.stride(1), up.stride(1)),
        WIDTH=width,
        TILE=_GATED,
        IS_GELU=is_gelu,
        num_warps=4,
    )
    return out
