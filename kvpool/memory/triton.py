"""Gather, scatter and copies from pool to pool on a CUDA device: one launch for each plane of a
section, queued on the caller's current stream.

The same bytes as the executors of the CPU, codecs fused. Imported only where there is such a
device: PyTorch for CUDA brings Triton along.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
import triton

from kvpool.core.layout.codec import CODEC_BLOCK_TOKENS, LEAST_SCALE, Codec, WireFormat
from kvpool.memory.triton_kernels import copy_rows, decode_blocks, encode_blocks, move_rows
from kvpool.memory.views import PlaneViews

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_TILE_BYTES = 16 << 10
"""128 bytes per thread of four warps: eight 16-byte accesses in flight."""
_TILE_ELEMENTS = 8 << 10
_WARPS = 4
ROUNDED = {"enable_fp_fusion": False}
"""Codecs round each product before it is added, as the CPU does."""


def gather_planes(planes: Sequence[PlaneViews], slots: torch.Tensor, wire: WireFormat) -> None:
    """The planes of one section; `slots` are its tokens' slots in the pool."""
    _launch(planes, slots, wire, into_pool=False)


def scatter_planes(planes: Sequence[PlaneViews], slots: torch.Tensor, wire: WireFormat) -> None:
    """The inverse. Only the blocks' owner calls it."""
    _launch(planes, slots, wire, into_pool=True)


def send_slots(
    source_slots: torch.Tensor, target_slots: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """int32 `[2, tokens]` on `device`, of int64 `[tokens]` on the CPU."""
    return _queued(torch.stack((source_slots, target_slots)), device)


def _queued(slots: torch.Tensor, device: torch.device) -> torch.Tensor:
    """int32, on `device`. From memory that isn't pinned the copy would wait for all earlier
    launches."""
    if device.type != "cuda":
        return slots.int().to(device)
    return slots.int().pin_memory().to(device, non_blocking=True)


def copy_planes(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], slots: torch.Tensor
) -> None:
    """Token i of slot `slots[0, i]` to slot `slots[1, i]`, in all layers of planes `[layers, slots,
    heads, dim]` of one dtype; `slots` come from `send_slots`."""
    with torch.cuda.device_of(targets[0]):
        for source, target in zip(sources, targets, strict=True):
            _copy_between(source.flatten(2), target.flatten(2), slots)


def _copy_between(source: torch.Tensor, target: torch.Tensor, slots: torch.Tensor) -> None:
    source, target = _as_words(source, target)
    grid, tile = _tiles(slots.shape[1], target)
    move_rows[grid](
        *(source, target, slots[0], slots[1], slots.shape[1], source.stride(0), target.stride(0)),
        SOURCE_ROW=source.stride(1),
        TARGET_ROW=target.stride(1),
        **tile,
        num_warps=_WARPS,
    )


def _launch(
    planes: Sequence[PlaneViews], slots: torch.Tensor, wire: WireFormat, *, into_pool: bool
) -> None:
    there = _queued(slots, planes[0].pool.device)
    with torch.cuda.device_of(planes[0].pool):
        for views in planes:
            if views.scales is None:
                _copy(views, there, into_pool=into_pool)
            else:
                _change(views, views.scales, there, wire.codec, into_pool=into_pool)


def _copy(views: PlaneViews, slots: torch.Tensor, *, into_pool: bool) -> None:
    tokens, heads, dim = views.values.shape[1:]
    pool = views.pool.flatten(2)[:, :, views.head * dim : (views.head + heads) * dim]
    slab = views.values.flatten(2)
    if pool.dtype == slab.dtype:
        pool, slab = _as_words(pool, slab)
    grid, tile = _tiles(tokens, slab)
    copy_rows[grid](
        *(pool, slab, slots, tokens, pool.stride(0), slab.stride(0)),
        POOL_ROW=pool.stride(1),
        **tile,
        INTO_POOL=into_pool,
        num_warps=_WARPS,
    )


def _tiles(tokens: int, rows: torch.Tensor) -> tuple[tuple[int, int, int], dict[str, int]]:
    """The grid and the tile that move this many rows of `[layers, ..., elements]`."""
    layers, row, size = rows.shape[0], rows.shape[2], rows.element_size()
    elements = min(triton.next_power_of_2(row), _TILE_BYTES // size)
    at_once = max(1, _TILE_BYTES // size // elements)
    grid = (triton.cdiv(tokens, at_once), triton.cdiv(row, elements), layers)
    return grid, {"ROW": row, "TOKENS": at_once, "ELEMENTS": elements}


def _as_words(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Of 8 bytes, if all rows start and end at multiples of that, else of fewer."""
    common = max(_WORDS)
    for tensor in tensors:
        size = tensor.element_size()
        starts = (tensor.storage_offset(), tensor.stride(0), tensor.stride(1), tensor.shape[2])
        common = gcd(common, tensor.data_ptr(), *(size * start for start in starts))
    return [tensor.view(_WORDS[common]) for tensor in tensors]


def _change(
    views: PlaneViews, scales: torch.Tensor, slots: torch.Tensor, codec: Codec, *, into_pool: bool
) -> None:
    layers, tokens, heads, dim = views.values.shape
    dim_tile = triton.next_power_of_2(dim)
    block_elements = CODEC_BLOCK_TOKENS * dim_tile
    heads_tile = min(triton.next_power_of_2(heads), max(1, _TILE_ELEMENTS // block_elements))
    grid = (scales.shape[1], triton.cdiv(heads, heads_tile), layers)
    shape = {
        "POOL_ROW": views.pool.stride(1),
        "HEADS": heads,
        "DIM": dim,
        "BLOCK": CODEC_BLOCK_TOKENS,
        "HEADS_TILE": heads_tile,
        "DIM_TILE": dim_tile,
        "IS_FP8": codec is Codec.FP8,
        **ROUNDED,
        "num_warps": 2 * _WARPS if heads_tile * block_elements > _TILE_ELEMENTS else _WARPS,
    }
    values = views.values.view(torch.int8)
    tensors = (views.pool[:, :, views.head :], values, scales, slots)
    strides = (views.pool.stride(0), values.stride(0), scales.stride(0))
    if into_pool:
        decode_blocks[grid](*tensors, tokens, *strides, **shape)
    else:
        rule = {"SCALE_PER_LARGEST": codec.scale_per_largest, "LEAST_SCALE": LEAST_SCALE}
        encode_blocks[grid](*tensors, tokens, *strides, **shape, **rule)
