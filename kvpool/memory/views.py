"""A section's planes as tensors, in a slab and in the pool. Runs in the worker that owns the
blocks. Views only: nothing is copied here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvpool.core.layout.codec import SCALE_BYTES, Codec, WireFormat, codec_blocks
from kvpool.core.layout.layout import BlockId
from kvpool.core.layout.shards import End
from kvpool.core.transfer.write import SlabSection
from kvpool.memory.kv_memory import KvMemory

_VALUES = {Codec.FP8: torch.float8_e4m3fn, Codec.INT8: torch.int8}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlabViews:
    """One plane of one section in a slab: `values` `[layers, tokens, heads, dim]`; `scales` float32
    `[layers, codec blocks, heads]`, None without a codec. Gaps exist only between layers."""

    values: torch.Tensor
    scales: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlaneViews(SlabViews):
    """`pool` is `[layers, slots, heads held, dim]`, of which `[head, head + heads)` travel."""

    pool: torch.Tensor
    head: int


def slab_views(section: SlabSection, wire: WireFormat, slab: torch.Tensor) -> list[SlabViews]:
    """# plane of the section |-> its views; `slab` is the whole write's payload, uint8."""
    values, scales = _slab_values(section, wire, slab), _slab_scales(section, wire, slab)
    return [SlabViews(values=v, scales=s) for v, s in zip(values, scales, strict=True)]


def plane_views(
    memory: KvMemory, section: SlabSection, wire: WireFormat, slab: torch.Tensor, end: End
) -> list[PlaneViews]:
    """`slab` is the whole write's payload, uint8; of a memory with one rank."""
    part = section.part
    first = part.first_layer(end)
    return [
        PlaneViews(
            pool=memory.planes[part.group][plane.plane].narrow(0, first, part.layers),
            head=plane.first_head(end),
            values=views.values,
            scales=views.scales,
        )
        for plane, views in zip(part.planes, slab_views(section, wire, slab), strict=True)
    ]


class BlockPieces(NamedTuple):
    """`taken` of the blocks' pieces, `each` in a block, after the first `skipped`."""

    blocks: tuple[BlockId, ...]
    each: int
    skipped: int
    taken: int

    def numbers(self) -> NDArray[np.int64]:
        """int64 `[taken]`: their places in the pool, counted in pieces."""
        assert min(self.blocks) >= 0, "a block that isn't held"
        blocks = np.array(self.blocks, dtype=np.int64)
        pieces = (blocks[:, None] * self.each + np.arange(self.each)).ravel()
        return pieces[self.skipped : self.skipped + self.taken]


def pieces_of(
    table: Sequence[BlockId], section: SlabSection, block_size: int, grain: int
) -> BlockPieces:
    """One piece for each `grain` of the section's tokens. It divides the block size, and the
    section's start and length."""
    first, last = section.start // block_size, -(-(section.start + section.tokens) // block_size)
    blocks = tuple(table[first:last])
    assert len(blocks) == last - first, f"a table of {len(table)} blocks ends before {last}"
    each = block_size // grain
    skipped = section.start // grain - first * each
    return BlockPieces(blocks, each, skipped, section.tokens // grain)


def row_index(table: Sequence[BlockId], section: SlabSection, block_size: int) -> torch.Tensor:
    """int64 `[tokens]`: each token's slot. Read only: planes and layers share it."""
    return _slots(pieces_of(table, section, block_size, 1))


@lru_cache(maxsize=64)
def _slots(tokens: BlockPieces) -> torch.Tensor:
    return torch.from_numpy(tokens.numbers())


def _slab_values(
    section: SlabSection, wire: WireFormat, slab: torch.Tensor
) -> Iterator[torch.Tensor]:
    """# plane of the section |-> `[layers, tokens, heads, dim]`"""
    part = section.part
    token_elements = part.elements_per_token_layer
    nbytes = part.layers * section.tokens * token_elements * wire.element_bytes
    dtype = _VALUES.get(wire.codec) or getattr(torch, wire.dtype)
    return _per_plane(
        slab.narrow(0, section.offset_bytes, nbytes).view(dtype),
        section,
        [(section.tokens, plane.heads, plane.dim) for plane in part.planes],
    )


def _slab_scales(
    section: SlabSection, wire: WireFormat, slab: torch.Tensor
) -> Iterator[torch.Tensor | None]:
    """# plane of the section |-> `[layers, codec blocks, heads]`"""
    part, blocks = section.part, codec_blocks(section.tokens)
    if wire.codec is Codec.NONE:
        return iter([None] * len(part.planes))
    values_end = wire.value_bytes(part.layers, section.tokens, part.elements_per_token_layer)
    nbytes = part.layers * blocks * sum(plane.heads for plane in part.planes) * SCALE_BYTES
    return _per_plane(
        slab.narrow(0, section.offset_bytes + values_end, nbytes).view(torch.float32),
        section,
        [(blocks, plane.heads) for plane in part.planes],
    )


def _per_plane(
    flat: torch.Tensor, section: SlabSection, shapes: Sequence[tuple[int, ...]]
) -> Iterator[torch.Tensor]:
    """`flat` holds, for each layer, each plane's `shape`; yields `[layers, *shape]` of each."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    by_layer = flat.view(section.part.layers, sum(sizes))
    for shape, piece in zip(shapes, by_layer.split(sizes, dim=1), strict=True):
        yield piece.unflatten(1, shape)
