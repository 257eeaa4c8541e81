"""The places of a worker's KV planes in one flat memory. Pure.

A peer that knows layout and number of blocks finds the same places:

[plane 0 of group 0 | plane 1 of group 0 | ... | plane 0 of group 1 | ...)

each `[layers, slots, heads, dim]`, slot = block x block_size + token, aligned to 256 bytes. A
worker with several tensor parallel ranks has one such map for the heads of each rank, one after
another. With more ranks than heads, each head has *copies* on consecutive ranks.

Where the layers are shared out too, among the stages of a pipeline, each rank's map is of a memory
of its own: the pool *lies apart*, and no peer finds places in it.
"""

from __future__ import annotations

from collections.abc import Iterator
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneShare:
    """What a rank of the grid holds of a plane; `layers` are indices in the group."""

    rank: int
    layers: range
    heads: range


@dataclass(frozen=True, kw_only=True)
class PoolMap:
    """`layout` is the whole model's; the map of each rank gives the places of its planes.

    `ranks` share the heads in each of the `stages`: the layers of each, in the order of their
    ranks. Without stages all ranks hold all layers.
    """

    layout: KvLayout
    blocks: int
    ranks: int = 1
    stages: tuple[range, ...] = ()

    @property
    def slots(self) -> int:
        return self.blocks * self.layout.block_size

    @cached_property
    def nbytes(self) -> int:
        """Of all ranks together."""
        if self.is_one:
            return self._end(self._planes)
        return sum(part.nbytes for part in self.parts)

    @property
    def is_one(self) -> bool:
        """True if nothing is shared out."""
        return self.ranks == 1 and not self.stages

    @cached_property
    def shards(self) -> tuple[ShardLayout, ...]:
        """# rank of the grid |-> its part of the model"""
        return tuple(
            ShardLayout(model=self.layout, shard=Shard(rank=rank, size=self.ranks, layers=layers))
            for layers in self.stages or (None,)
            for rank in range(self.ranks)
        )

    @cached_property
    def parts(self) -> tuple[PoolMap, ...]:
        """# rank of the grid |-> the map of its own KV; without stages all are alike and
        consecutive"""
        if self.is_one:
            return (self,)
        return tuple(PoolMap(layout=one.local, blocks=self.blocks) for one in self.shards)

    def copies(self, group: int, plane: int) -> int:
        """The number of ranks that hold each head of a layer."""
        return max(1, self.ranks // self.layout.groups[group].planes[plane].heads)

    @cached_property
    def most_copies(self) -> int:
        return max(self.copies(group, plane) for group, plane in self._planes)

    def shares(self, group: int, plane: int, copy: int) -> Iterator[PlaneShare]:
        """Together every head of every layer once, a layer's in the heads' order; each `copy` is on
        other ranks."""
        total = self.layout.groups[group].planes[plane].heads
        copies = self.copies(group, plane)
        for stage, layers in enumerate(self._members[group]):
            for rank in range(copy % copies, self.ranks, copies):
                heads = Shard(rank=rank, size=self.ranks).heads(total)
                yield PlaneShare(rank=stage * self.ranks + rank, layers=layers, heads=heads)

    @cached_property
    def _members(self) -> tuple[tuple[range, ...], ...]:
        """# layer group |-> stage |-> indices of its layers in the group"""
        stages = [Shard(layers=layers) for layers in self.stages or (None,)]
        found = tuple(tuple(s.members(group) for s in stages) for group in self.layout.groups)
        held = [sum(map(len, members)) for members in found]
        assert held == [len(group.layers) for group in self.layout.groups], (held, self.stages)
        return found

    @cached_property
    def bytes_per_block(self) -> int:
        """Bytes of one block in every group, with all copies of its heads."""
        return sum(part.layout.bytes_per_block for part in self.parts)

    def part_offset(self, rank: int) -> int:
        assert not self.stages, "memory that lies apart"
        return sum(part.nbytes for part in self.parts[:rank])

    def offset(self, group: int, plane: int) -> int:
        """Bytes before the plane."""
        assert self.is_one, "asked of a rank's part"
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
