"""Launches the paged-attention kernels on the caller's current stream. Runs in the worker.

Imported only where it is used: PyTorch for CUDA brings Triton along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from engine.attention.triton.kernels import attend_pieces, join_parts, store_rows
from engine.attention.triton.rotating_kernels import rotate_and_store_rows
from engine.attention.triton.work import Tiling
from engine.model.interface import Scores

ROTATED = 1024
"""A program rotates about this many numbers."""
ROUNDED = {"enable_fp_fusion": False}
"""Products are rounded before they are added, as torch's are."""
_JOINED = 16
"""Decode steps have few rows of many parts: one program of a join reads this many parts of a row at
a time. Chunks have many rows of few parts: it reads a part of this many rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork:
    """A `Work` and its query tiles as int32 tensors; `tables` holds all the block tables."""

    queries: torch.Tensor
    pieces: torch.Tensor
    starts: torch.Tensor
    joins: torch.Tensor
    tables: torch.Tensor

    @property
    def programs(self) -> int:
        return self.starts.shape[0] - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Memory for pieces that are joined later; all launches may share it."""

    values: torch.Tensor  # fp32 [elements]
    sizes: torch.Tensor  # fp32 [elements]


def part_elements(rows: int, value_dim: int, slots: int) -> tuple[int, int]:
    """The size of Parts for this many slots."""
    return slots * rows * _tile(value_dim), slots * rows * 2


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Writes `key`, `value` `[kv_heads, tokens, dim]` into the planes; `slots` int32, -1:
    nowhere."""
    key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (key, value))
    heads, tokens, k_dim = key.shape
    v_dim = value.shape[2]
    store_rows[(tokens,)](
        key,
        value,
        keys,
        values,
        slots,
        key.stride(1),
        key.stride(0),
        value.stride(1),
        value.stride(0),
        HEADS=heads,
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_ROW=triton.next_power_of_2(heads * k_dim),
        V_ROW=triton.next_power_of_2(heads * v_dim),
        LIMIT=_limit(keys),
        num_warps=4,
    )


def rotate_and_store(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Writes rotated `key` and `value` `[kv_heads, tokens, dim]` into the planes. Returns rotated
    `query` `[heads, tokens, dim]` as `[tokens, heads, dim]`. The last dimension of all is dense;
    the angles are `[1, 1, tokens, dim]`, `slots` int32, -1: nowhere."""
    (heads, tokens, dim), (kv_heads, _, v_dim) = query.shape, value.shape
    out = query.new_empty(tokens, heads, dim)
    half_tile = triton.next_power_of_2(dim // 2)
    at_once = min(triton.next_power_of_2(heads), max(1, ROTATED // half_tile))
    parts = triton.cdiv(heads, at_once) + triton.cdiv(kv_heads, at_once) + 1
    rotate_and_store_rows[(tokens, parts)](
        *(query, key, value, cos, sin, out, keys, values, slots),
        *(step for one in (query, key, value) for step in (one.stride(1), one.stride(0))),
        cos.stride(2),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        HALF_TILE=half_tile,
        V_DIM=v_dim,
        V_ROW=triton.next_power_of_2(kv_heads * v_dim),
        AT_ONCE=at_once,
        LIMIT=_limit(keys),
        num_warps=4,
        **ROUNDED,
    )
    return out


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    work: DeviceWork,
    parts: Parts,
    scores: Scores,
    tiling: Tiling,
    *,
    block_size: int,
    joined_rows: int,
) -> None:
    """`query` `[tokens, heads, dim]`, `out` `[tokens, heads, value_dim]`, contiguous; the rows of
    the work's query tiles are written. A tile has at most `joined_rows` rows."""
    query = query if query.stride(2) == 1 else query.contiguous()
    sinks = out if scores.sinks is None else scores.sinks
    common = {
        "GROUP": query.shape[1] // values.shape[1],
        "V_DIM": values.shape[2],
        "V_TILE": _tile(values.shape[2]),
        "ROWS": tiling.rows,
        "HAS_SINKS": scores.sinks is not None,
    }
    left = (parts.values, parts.sizes, work.queries)
    attend_pieces[(work.programs,)](
        *(query, keys, values, out),
        *left,
        *(work.pieces, work.starts, work.tables, sinks),
        *(float(scores.scaling), float(scores.softcap or 1.0)),
        *(query.stride(0), query.stride(1), out.stride(0)),
        **common,
        **_constants(query, values, scores, tiling, block_size),
    )
    rows, at_a_time = (1, _JOINED) if joined_rows < _JOINED else (_JOINED, 1)
    join_parts[(work.programs, triton.cdiv(joined_rows, rows))](
        *(out, *left, work.joins, sinks, out.stride(0)),
        AT_ONCE=rows,
        PARTS=at_a_time,
        num_warps=4,
        **common,
    )


def _constants(
    query: torch.Tensor, values: torch.Tensor, scores: Scores, tiling: Tiling, block_size: int
) -> dict[str, Any]:
    return {
        "KV_HEADS": values.shape[1],
        "K_DIM": query.shape[2],
        "K_TILE": _tile(query.shape[2]),
        "KEYS": tiling.keys,
        "BLOCK": block_size,
        "WINDOW": scores.window or 0,
        "HAS_CAP": scores.softcap is not None,
        "UPCAST": query.dtype is torch.bfloat16 and query.device.type == "cpu",
        "PRECISION": _precision(),
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }


def _limit(plane: torch.Tensor) -> float:
    """What is larger is kept as this; 0: no number is too large."""
    return torch.finfo(plane.dtype).max if plane.dtype.itemsize == 1 else 0.0


def _tile(dim: int) -> int:
    """A matrix product takes powers of two from 16 on."""
    return max(16, triton.next_power_of_2(dim))


def _precision() -> str:
    """Precision of fp32 products, as torch is configured."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
