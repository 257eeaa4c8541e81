"""Launches of all Triton kernels, on tensors without memory, as for Llama-3.1-8B where no other
shape is named: what `test_kernels_compiled` compiles."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.attention.triton.launch import (
    DeviceWork,
    Parts,
    attend,
    rotate_and_store,
    store,
)
from engine.attention.triton.work import Tiling
from engine.compiled.triton.fp8 import rows_to_fp8
from engine.compiled.triton.operations import TritonOperations
from engine.model.interface import Scores
from engine.sampling import triton_draw
from engine.sampling.gumbel import Draws
from kvpool.core.layout.codec import Codec, WireFormat
from kvpool.memory.triton import copy_planes, gather_planes, scatter_planes
from kvpool.memory.views import PlaneViews

Call = Callable[[], object]
HEADS, KV_HEADS, DIM, WIDTH, GATED = 32, 8, 128, 4096, 14_336
GROUP = HEADS // KV_HEADS
_TOKENS, _SLOTS, _LAYERS, _BLOCK = 33, 64, 2, 16
_PIECES = 48


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _int32(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def _views(pool: torch.dtype, slab: torch.dtype, *, scaled: bool) -> PlaneViews:
    scales = empty(_LAYERS, 3, KV_HEADS, dtype=torch.float32) if scaled else None
    values = empty(_LAYERS, _TOKENS, KV_HEADS, DIM, dtype=slab)
    planes = empty(_LAYERS, _SLOTS, KV_HEADS, DIM, dtype=pool)
    return PlaneViews(values=values, scales=scales, pool=planes, head=0)


def moved(
    pool: torch.dtype, slab: torch.dtype, codec: Codec = Codec.NONE, *, into_pool: bool
) -> Call:
    views = _views(pool, slab, scaled=codec is not Codec.NONE)
    move = scatter_planes if into_pool else gather_planes
    return lambda: move([views], _int32(_TOKENS), WireFormat(dtype="bfloat16", codec=codec))


def moved_between_pools() -> None:
    source, target = empty(2, _LAYERS, _SLOTS, KV_HEADS, DIM)
    copy_planes([source], [target], _int32(2, _TOKENS))


def _planes(dim: int, kept: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = empty(2, _SLOTS, KV_HEADS, dim, dtype=kept)
    return keys, values


def attended(
    dtype: torch.dtype,
    tiling: Tiling,
    *,
    dim: int = DIM,
    kept: torch.dtype | None = None,
    block: int = _BLOCK,
    scores: Scores | None = None,
    joined_rows: int | None = None,
) -> Call:
    """`kept`: the planes' dtype, if another."""
    query, parts = empty(_TOKENS, HEADS, dim, dtype=dtype), empty(_PIECES, dtype=torch.float32)
    work = DeviceWork(
        queries=_int32(16, 4), pieces=_int32(_PIECES, 5), starts=_int32(9), joins=_int32(8, 4),
        tables=_int32(16),
    )  # fmt: skip
    return lambda: attend(
        query,
        *_planes(dim, kept or dtype),
        empty(_TOKENS, HEADS, dim, dtype=dtype),
        work,
        Parts(values=parts, sizes=parts),
        scores or Scores(scaling=0.125),
        tiling,
        block_size=block,
        joined_rows=joined_rows or tiling.rows,
    )


def stored(kept: torch.dtype) -> Call:
    fresh = empty(_TOKENS, KV_HEADS, DIM).transpose(0, 1)
    return lambda: store(fresh, fresh, *_planes(DIM, kept), _int32(_TOKENS))


def rotated_and_stored(kept: torch.dtype) -> Call:
    """Queries, keys and values are parts of one product."""
    whole = empty(_TOKENS, HEADS + 2 * KV_HEADS, DIM).transpose(0, 1)
    query, key, value = whole.split([HEADS, KV_HEADS, KV_HEADS])
    angles, slots = empty(1, 1, _TOKENS, DIM), _int32(_TOKENS)
    return lambda: rotate_and_store(query, key, value, angles, angles, *_planes(DIM, kept), slots)


def normed(dtype: torch.dtype, *, rounds: bool = False) -> None:
    rows, weight = empty(1, _TOKENS, WIDTH, dtype=dtype), empty(WIDTH, dtype=torch.float32)
    TritonOperations().rms_norm(rows, weight, 1e-5, rounds)


def summed_and_normed() -> None:
    rows, weight = empty(1, _TOKENS, WIDTH), empty(WIDTH, dtype=torch.float32)
    TritonOperations().add_rms_norm(rows, rows, weight, 1e-5, False)


def rotated() -> None:
    heads, angles = empty(1, _TOKENS, HEADS, DIM).transpose(1, 2), empty(1, 1, _TOKENS, DIM)
    TritonOperations().rotate(heads, angles, angles)


def gated(dtype: torch.dtype, *, is_gelu: bool) -> None:
    gate, up = empty(1, _TOKENS, 2 * GATED, dtype=dtype).split(GATED, dim=2)
    operations = TritonOperations()
    (operations.gelu_tanh_mul if is_gelu else operations.silu_mul)(gate, up)


def scaled() -> None:
    rows_to_fp8(empty(_TOKENS, WIDTH))


def drawn() -> None:
    keys, cuts = np.zeros((2, 4), dtype=np.uint32), np.zeros((2, 3), dtype=np.float32)
    draws = Draws(keys=keys, temperatures=np.ones(2, dtype=np.float32), cuts=cuts)
    triton_draw.draw(empty(2, 128_256, dtype=torch.float32), draws)
