"""The places of a worker's KV planes in one flat memory. Pure.

A peer that knows layout and number of blocks finds the same places:

[plane 0 of group 0 | plane 1 of group 0 | ... | plane 0 of group 1 | ...)

each `[layers, slots, heads, dim]`, slot = block x block_size + token, aligned to 256 bytes. A
worker with several tensor parallel ranks has one such map for the heads of each rank, one after
another. With more ranks than heads, each head has *copies* on consecutive ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvpool.core.layout.layout import KvLayout
from kvpool.core.layout.shards import Shard, ShardLayout
from kvpool.core.transfer.codec_choice import NO_CODEC, CodecOffer

_ALIGNED_BYTES = 256
"""Loads of every width, and copy engines, are fastest from such an address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFacts:
    """What a peer must know of this worker's KV memory: its pool, and the size of a slab.

    `region` is the link's name of the whole pool; empty if the link can't read it. With
    `mixed_precision`, KV of another dtype may be exchanged and is converted. `ranks` share the
    heads.
    """

    dtype: str
    block_size: int
    blocks: int
    slab_bytes: int
    region: str = ""
    offer: CodecOffer = NO_CODEC
    mixed_precision: bool = False
    ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class PoolMap:
    """`layout` is the whole model's; the map of each rank gives the places of its planes."""

    layout: KvLayout
    blocks: int
    ranks: int = 1

    @property
    def slots(self) -> int:
        return self.blocks * self.layout.block_size

    @cached_property
    def nbytes(self) -> int:
        if self.ranks > 1:
            return self.ranks * self.parts[0].nbytes
        return self._end(self._planes)

    @cached_property
    def shards(self) -> tuple[ShardLayout, ...]:
        """# rank |-> its part of the model"""
        shards = (Shard(rank=rank, size=self.ranks) for rank in range(self.ranks))
        return tuple(ShardLayout(model=self.layout, shard=shard) for shard in shards)

    @cached_property
    def parts(self) -> tuple[PoolMap, ...]:
        """# rank |-> the map of its heads; all are alike and consecutive"""
        if self.ranks == 1:
            return (self,)
        return tuple(PoolMap(layout=one.local, blocks=self.blocks) for one in self.shards)

    def copies(self, group: int, plane: int) -> int:
        """The number of ranks that hold each head."""
        return max(1, self.ranks // self.layout.groups[group].planes[plane].heads)

    @cached_property
    def most_copies(self) -> int:
        return max(self.copies(group, plane) for group, plane in self._planes)

    def holders(self, group: int, plane: int, copy: int) -> range:
        """Ranks that together hold every head once, in the heads' order; each `copy` has other
        ranks."""
        copies = self.copies(group, plane)
        return range(copy % copies, self.ranks, copies)

    def held(self, group: int, plane: int, rank: int) -> range:
        """The heads of a rank."""
        total = self.layout.groups[group].planes[plane].heads
        return Shard(rank=rank, size=self.ranks).heads(total)

    @cached_property
    def bytes_per_block(self) -> int:
        """Bytes of one block in every group, with all copies of its heads."""
        return sum(part.layout.bytes_per_block for part in self.parts)

    def part_offset(self, rank: int) -> int:
        return sum(part.nbytes for part in self.parts[:rank])

    def offset(self, group: int, plane: int) -> int:
        """Bytes before the plane."""
        assert self.ranks == 1, "asked of a rank's part"
        return self._offsets[group, plane]

    def plane_bytes(self, group: int, plane: int) -> int:
        layers = len(self.layout.groups[group].layers)
        return layers * self.slots * self.token_bytes(group, plane)

    def token_bytes(self, group: int, plane: int) -> int:
        """Bytes of one token's heads."""
        return self.layout.groups[group].planes[plane].elements * self.layout.element_bytes

    def row_offset(self, group: int, plane: int, layer: int, slot: int) -> int:
        """Bytes before the heads of one token in the group's `layer`-th layer."""
        row = self.token_bytes(group, plane)
        return self.offset(group, plane) + (layer * self.slots + slot) * row

    @cached_property
    def _offsets(self) -> dict[tuple[int, int], int]:
        return {at: self._end(self._planes[:before]) for before, at in enumerate(self._planes)}

    @cached_property
    def _planes(self) -> tuple[tuple[int, int], ...]:
        return tuple(
            (g, p) for g, group in enumerate(self.layout.groups) for p in range(len(group.planes))
        )

    def _end(self, planes: tuple[tuple[int, int], ...]) -> int:
        return sum(-(-self.plane_bytes(g, p) // _ALIGNED_BYTES) * _ALIGNED_BYTES for g, p in planes)
