"""Gather and scatter that change elements on the way: codecs, and pools of another dtype. Runs in the
worker that owns the blocks; for the CPU and for devices without kernels of ours.

Works in pieces that stay in a core's cache, so no other copy of a slab is ever made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvpool.codec import CODEC_BLOCK_TOKENS, Codec
from kvpool.memory_views import PlaneViews

_PIECE_ELEMENTS = 1 << 18
"""1 MiB in float32."""
LEAST_SCALE = 2.0**-126
"""The least normal float32: all-zero heads need no care, and no scale's inverse overflows."""


def gather_changed(views: PlaneViews, slots: torch.Tensor, codec: Codec) -> None:
    """`slots` int64 `[tokens]` on the CPU. Values that aren't finite make their codec block and
    head NaN as a whole, so that a broken pool stays visible."""
    pool, slots = _travelling(views), slots.to(views.pool.device)
    for layers, tokens in _pieces(views):
        found = pool[layers].index_select(1, slots[tokens])
        values = views.values[layers, tokens]
        if views.scales is None:
            values.copy_(found)
        else:
            _encode(found, values, views.scales[layers, _codec_blocks(tokens)], codec)


def scatter_changed(views: PlaneViews, slots: torch.Tensor) -> None:
    """The inverse, as far as the codec allows. Only the blocks' owner calls it."""
    pool, slots = _travelling(views), slots.to(views.pool.device)
    for layers, tokens in _pieces(views):
        values = views.values[layers, tokens]
        if views.scales is not None:
            values = _decode(values, views.scales[layers, _codec_blocks(tokens)])
        pool[layers].index_copy_(1, slots[tokens], values.to(pool.dtype))


def _travelling(views: PlaneViews) -> torch.Tensor:
    return views.pool.narrow(2, views.head, views.values.shape[2])


def _pieces(views: PlaneViews) -> Iterator[tuple[slice, slice]]:
    """(layers, tokens) of each; tokens begin at codec blocks, and only whole ones are mixed."""
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


def _codec_blocks(tokens: slice) -> slice:
    return slice(tokens.start // CODEC_BLOCK_TOKENS, -(-tokens.stop // CODEC_BLOCK_TOKENS))


def _encode(found: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, codec: Codec) -> None:
    """`found` and `values` are `[layers, tokens, heads, dim]`, `scales` `[layers, blocks, heads]`."""
    blocks = found.unflatten(1, (scales.shape[1], -1))  # [layers, blocks, tokens, heads, dim]
    largest = blocks.abs().amax((2, 4)).float()
    finite = largest.isfinite()
    torch.mul(largest, 1 / codec.largest_code, out=largest)
    scales.copy_(largest.clamp_(min=LEAST_SCALE).masked_fill_(~finite, torch.nan))
    codes = blocks * (1 / scales)[:, :, None, :, None]
    if not finite.all():
        codes.nan_to_num_(nan=0.0)
    if codec is Codec.INT8:
        codes.round_()
    values.copy_(codes.view(values.shape))


def _decode(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    blocks = values.float().unflatten(1, (scales.shape[1], -1))
    return blocks.mul_(scales[:, :, None, :, None]).view(values.shape)
