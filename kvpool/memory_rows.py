"""Copies, bit by bit, between rows of a pool in host memory and rows of a slab. Runs in the worker
that owns the blocks.

Everything that travels is seen as rows of one length, so that a section's copies are one call of
numpy, which moves a row at a time: twice as fast as PyTorch's indexing, an element at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray

from kvpool.memory import KvMemory
from kvpool.memory_views import row_index
from kvpool.pool_map import PoolMap
from kvpool.reslice import End, GroupSlice, PlaneSlice
from kvpool.write import Section, Side

Bytes = NDArray[np.uint8]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Slab row `[l, r]` is the pool's row `index[l, r]`.

    `pool` is `[pool rows, row bytes]`, `index` `[layers, rows of a layer]`.
    """

    pool: Bytes
    index: Index

    def part(self, layers: slice, rows: slice) -> Rows:
        return Rows(pool=self.pool, index=self.index[layers, rows])

    def gather(self, slab: torch.Tensor) -> None:
        """Into `slab`, contiguous, of any dtype."""
        rows = self._of(slab)
        np.take(self.pool, self.index.ravel(), axis=0, out=rows, mode="clip")

    def scatter(self, slab: torch.Tensor) -> None:
        """The inverse. Only the blocks' owner calls it."""
        self.pool[self.index.ravel()] = self._of(slab)

    def _of(self, slab: torch.Tensor) -> Bytes:
        rows: Bytes = slab.view(-1).view(torch.uint8).numpy()
        return rows.reshape(self.index.size, self.pool.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a plane's pieces lie in the pool, in bytes: the `i`-th piece of the `l`-th layer at
    `start + l x layer + i x step`."""

    start: int
    layer: int
    layers: int
    step: int
    nbytes: int  # of a piece

    @property
    def grain(self) -> int:
        """What all of these are multiples of."""
        return gcd(self.start, self.layer, self.step, self.nbytes)

    def rows(self, pieces: Index, row_bytes: int) -> Index:
        """`[layers, pieces, rows of a piece]`: which of the pool's rows of `row_bytes` they are."""
        layers = self.start + self.layer * np.arange(self.layers)
        starts = (layers[:, None] + self.step * pieces) // row_bytes
        return starts[:, :, None] + np.arange(self.nbytes // row_bytes)


def place_of(pool: PoolMap, part: GroupSlice, plane: PlaneSlice, end: End, tokens: int) -> Place:
    """Of pieces of `tokens` slots; where only some heads travel, of one."""
    held = pool.layout.groups[part.group].planes[plane.plane].heads
    assert tokens == 1 or plane.heads == held, (tokens, plane.heads, held)
    layer, head = part.first_layer(end), plane.first_head(end)
    head_bytes = plane.dim * pool.layout.element_bytes
    return Place(
        start=pool.row_offset(part.group, plane.plane, layer, 0) + head * head_bytes,
        layer=pool.slots * held * head_bytes,
        layers=part.layers,
        step=tokens * held * head_bytes,
        nbytes=tokens * plane.heads * head_bytes,
    )


def pool_rows(memory: KvMemory, row_bytes: int) -> Bytes:
    """`[rows, row_bytes]`, without what is left at the end."""
    flat: Bytes = memory.flat.numpy()
    return flat[: len(flat) // row_bytes * row_bytes].reshape(-1, row_bytes)


def section_rows(memory: KvMemory, section: Section, side: Side, end: End) -> Rows:
    """All planes, for each layer; rows are as long as alignment allows: whole blocks, parts of
    them, tokens, or parts of a token where only some of its heads travel."""
    part, planes = section.part, memory.layout.groups[section.part.group].planes
    whole = all(plane.heads == planes[plane.plane].heads for plane in part.planes)
    tokens = gcd(side.block_size, section.start, section.tokens) if whole else 1
    return _rows(memory, section, side, end, part.planes, tokens)


def plane_rows(memory: KvMemory, section: Section, side: Side, end: End, plane: PlaneSlice) -> Rows:
    """One plane, by token."""
    return _rows(memory, section, side, end, (plane,), 1)


def _rows(
    memory: KvMemory,
    section: Section,
    side: Side,
    end: End,
    planes: Sequence[PlaneSlice],
    tokens: int,
) -> Rows:
    places = [place_of(memory.map, section.part, plane, end, tokens) for plane in planes]
    row_bytes = gcd(*(place.grain for place in places))
    pieces = row_index(side.tables[section.part.group], section, side.block_size, tokens).numpy()
    found = [place.rows(pieces, row_bytes).reshape(place.layers, -1) for place in places]
    index = np.concatenate(found, axis=1)
    pool = pool_rows(memory, row_bytes)
    assert not index.size or index.max() < len(pool), (index.max(), len(pool))
    return Rows(pool=pool, index=index)


class BlockRows:
    """Whole blocks of every group, in their canonical order, over the rows of `memory`."""

    def __init__(self, memory: KvMemory) -> None:
        starts, steps, groups = [*zip(*_plane_blocks(memory.map), strict=True)]
        row_bytes = gcd(*starts, *steps)
        counts = [step // row_bytes for step in steps]
        self._pool = pool_rows(memory, row_bytes)
        self._first = np.concatenate(
            [start // row_bytes + np.arange(n) for start, n in zip(starts, counts, strict=True)]
        )
        self._step = np.repeat(counts, counts)
        self._group = np.repeat(groups, counts)

    def of(self, blocks: Sequence[Sequence[int]]) -> Rows:
        """`blocks[i][g]` is the `i`-th block's place in group `g`."""
        ids = np.array(blocks, dtype=np.int64)
        assert ids.size == 0 or ids.min() >= 0, "a block that isn't held"
        return Rows(pool=self._pool, index=self._first + self._step * ids[:, self._group])


def _plane_blocks(pool: PoolMap) -> Iterator[tuple[int, int, int]]:
    """(where block 0 begins, bytes of a block, group) of each layer's planes"""
    for index, group in enumerate(pool.layout.groups):
        for layer in range(len(group.layers)):
            for number, plane in enumerate(group.planes):
                token_bytes = plane.elements * pool.layout.element_bytes
                start = pool.row_offset(index, number, layer, 0)
                yield start, token_bytes * pool.layout.block_size, index
