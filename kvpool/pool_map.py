"""Where in one flat memory each plane of a worker's KV pool lies. Pure.

A peer that knows layout and number of blocks finds the same places:

[plane 0 of group 0 | plane 1 of group 0 | ... | plane 0 of group 1 | ...)

each `[layers, slots, heads, dim]`, slot = block x block_size + token, on a border of 256 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.codec_choice import NO_CODEC, CodecOffer
from kvpool.layout import KvLayout

_ALIGNED_BYTES = 256
"""Loads of every width, and copy engines, are at their best from such an address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFacts:
    """What a peer must know of this worker's KV memory: its pool, and what one slab holds.

    `region` is the whole pool's, as the link calls it; empty where the link can't read it.
    `mixed_precision`: KV of another dtype may come and go, converted.
    """

    dtype: str
    block_size: int
    blocks: int
    slab_bytes: int
    region: str = ""
    offer: CodecOffer = NO_CODEC
    mixed_precision: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMap:
    layout: KvLayout
    blocks: int

    @property
    def slots(self) -> int:
        return self.blocks * self.layout.block_size

    @property
    def nbytes(self) -> int:
        return self._end(self._planes)

    def offset(self, group: int, plane: int) -> int:
        """Bytes before the plane."""
        before = sum(len(g.planes) for g in self.layout.groups[:group]) + plane
        return self._end(self._planes[:before])

    def plane_bytes(self, group: int, plane: int) -> int:
        spec = self.layout.groups[group]
        row = spec.planes[plane].elements * self.layout.element_bytes
        return len(spec.layers) * self.slots * row

    def row_offset(self, group: int, plane: int, layer: int, slot: int) -> int:
        """Bytes before the heads of one token in the group's `layer`-th layer."""
        row = self.layout.groups[group].planes[plane].elements * self.layout.element_bytes
        return self.offset(group, plane) + (layer * self.slots + slot) * row

    @property
    def _planes(self) -> tuple[tuple[int, int], ...]:
        return tuple(
            (g, p) for g, group in enumerate(self.layout.groups) for p in range(len(group.planes))
        )

    def _end(self, planes: tuple[tuple[int, int], ...]) -> int:
        return sum(-(-self.plane_bytes(g, p) // _ALIGNED_BYTES) * _ALIGNED_BYTES for g, p in planes)
