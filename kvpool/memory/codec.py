"""Gather and scatter that change elements on the way: codecs, and pools of another dtype. Runs in
the worker that owns the blocks; for pools in host memory.

Works in pieces that stay in the cache, so no other copy of a slab is ever made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvpool.core.layout.codec import CODEC_BLOCK_TOKENS, LEAST_SCALE, Codec
from kvpool.memory.rows import SlabRows
from kvpool.memory.views import SlabViews

_PIECE_ELEMENTS = 1 << 20
"""4 MiB in float32; smaller pieces spend their time on starting operations (measured)."""
_MAGNITUDE_BITS = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFF_FFFF)}


def gather_changed(views: SlabViews, rows: SlabRows, dtype: torch.dtype, codec: Codec) -> None:
    """`rows`, of `dtype`, are by token. An element that isn't finite makes its whole codec block
    and head NaN, so that a broken pool stays visible."""
    for layers, tokens in _pieces(views):
        values = views.values[layers, tokens]
        found = torch.empty(values.shape, dtype=dtype, device=values.device)
        rows.part(layers, _rows_of(tokens, rows, views)).gather(found)
        if views.scales is None:
            values.copy_(found)
        else:
            _encode(found, values, views.scales[layers, _codec_blocks(tokens)], codec)


def scatter_changed(views: SlabViews, rows: SlabRows, dtype: torch.dtype, codec: Codec) -> None:
    """The inverse, as far as the codec allows. Only the blocks' owner calls it."""
    for layers, tokens in _pieces(views):
        values = views.values[layers, tokens]
        if views.scales is not None:
            values = _decode(values, views.scales[layers, _codec_blocks(tokens)], codec)
        part = rows.part(layers, _rows_of(tokens, rows, views))
        part.scatter(values.to(dtype, memory_format=torch.contiguous_format))


def _pieces(views: SlabViews) -> Iterator[tuple[slice, slice]]:
    """(layers, tokens) of each piece; its tokens begin at codec blocks, and consist of whole ones
    or end with the last."""
    layers, tokens, heads, dim = views.values.shape
    whole = tokens // CODEC_BLOCK_TOKENS * CODEC_BLOCK_TOKENS
    most = max(1, _PIECE_ELEMENTS // (heads * dim * CODEC_BLOCK_TOKENS)) * CODEC_BLOCK_TOKENS
    for start in range(0, whole, most):
        end = min(start + most, whole)
        yield from _layer_pieces(layers, slice(start, end), heads * dim)
    if whole < tokens:
        yield from _layer_pieces(layers, slice(whole, tokens), heads * dim)


def _layer_pieces(layers: int, tokens: slice, row: int) -> Iterator[tuple[slice, slice]]:
    most = max(1, _PIECE_ELEMENTS // ((tokens.stop - tokens.start) * row))
    for first in range(0, layers, most):
        yield slice(first, min(first + most, layers)), tokens


def _rows_of(tokens: slice, rows: SlabRows, views: SlabViews) -> slice:
    each = rows.index.shape[1] // views.values.shape[1]
    return slice(tokens.start * each, tokens.stop * each)


def _codec_blocks(tokens: slice) -> slice:
    return slice(tokens.start // CODEC_BLOCK_TOKENS, -(-tokens.stop // CODEC_BLOCK_TOKENS))


def _encode(found: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, codec: Codec) -> None:
    """`found`, `values` `[layers, tokens, heads, dim]`, `scales` `[layers, blocks, heads]`."""
    blocks = found.unflatten(1, (scales.shape[1], -1))  # [layers, blocks, tokens, heads, dim]
    scale = _largest(blocks).mul_(codec.scale_per_largest).clamp_(min=LEAST_SCALE)
    scale.masked_fill_(~scale.isfinite(), torch.nan)
    scales.copy_(scale)
    codes = blocks.float().mul_(scale.reciprocal_()[:, :, None, :, None])
    if codec is Codec.INT8:
        codes.round_()
    values.copy_(codes.view(values.shape))


def _largest(blocks: torch.Tensor) -> torch.Tensor:
    """Magnitude per block and head, float32 `[layers, blocks, heads]`; not finite if any isn't.

    As integers, the bits of magnitudes have the same order, and integers are reduced faster.
    """
    integers, mask = _MAGNITUDE_BITS[blocks.element_size()]
    magnitudes = blocks.view(integers) & mask
    return magnitudes.amax(2).amax(-1).view(blocks.dtype).float()


def _decode(values: torch.Tensor, scales: torch.Tensor, codec: Codec) -> torch.Tensor:
    if codec is Codec.FP8:
        numbers, scales = _fp8_as_float16(values), scales * 256.0
    else:
        numbers = values
    blocks = numbers.float().unflatten(1, (scales.shape[1], -1))
    return blocks.mul_(scales[:, :, None, :, None]).view(values.shape)


def _fp8_as_float16(values: torch.Tensor) -> torch.Tensor:
    """A 256th of each e4m3 number, exact: its bits, shifted to float16's places."""
    shifted = values.view(torch.int8).to(torch.int16).mul_(128)
    return shifted.bitwise_and_(~0x4000).view(torch.float16)
