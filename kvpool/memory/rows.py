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

from kvpool.memory.kv_memory import KvMemory
from kvpool.memory.views import row_index
from kvpool.pool.map import PoolMap
from kvpool.reslice import End, GroupSlice, PlaneSlice
from kvpool.write import Section, Side

Bytes = NDArray[np.uint8]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Slab row `[l, r]` is the pool's row `index[l, r]`, and each of the `others`.

    `pool` is `[pool rows, row bytes]`, `index` `[layers, rows of a layer]` and so are the `others`:
    where heads have copies.
    """

    pool: Bytes
    index: Index
    others: tuple[Index, ...] = ()

    def part(self, layers: slice, rows: slice) -> Rows:
        others = tuple(other[layers, rows] for other in self.others)
        return Rows(pool=self.pool, index=self.index[layers, rows], others=others)

    def gather(self, slab: torch.Tensor) -> None:
        """Into `slab`, contiguous, of any dtype."""
        rows = self._of(slab)
        np.take(self.pool, self.index.ravel(), axis=0, out=rows, mode="clip")

    def scatter(self, slab: torch.Tensor) -> None:
        """The inverse. Only the blocks' owner calls it."""
        rows = self._of(slab)
        for index in (self.index, *self.others):
            self.pool[index.ravel()] = rows

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


def places_of(
    pool: PoolMap, part: GroupSlice, plane: PlaneSlice, end: End, tokens: int, copy: int = 0
) -> list[Place]:
    """Of pieces of `tokens` slots, one for each rank that holds some of the heads, in their order;
    where only some of a rank's heads travel, or several ranks hold them, of one slot."""
    total = pool.layout.groups[part.group].planes[plane.plane].heads
    first = plane.first_head(end)
    found = []
    for rank in pool.holders(part.group, plane.plane, copy):
        held = pool.held(part.group, plane.plane, rank)
        heads = range(max(first, held.start), min(first + plane.heads, held.stop))
        if heads:
            assert tokens == 1 or heads == range(total), (tokens, heads, total)
            inside = range(heads.start - held.start, heads.stop - held.start)
            found.append(_place(pool, rank, part, plane, end, inside, tokens))
    return found


def _place(
    pool: PoolMap,
    rank: int,
    part: GroupSlice,
    plane: PlaneSlice,
    end: End,
    heads: range,
    tokens: int,
) -> Place:
    """`heads` are the rank's own numbers."""
    own, layer = pool.parts[rank], part.first_layer(end)
    head_bytes = plane.dim * own.layout.element_bytes
    row = own.layout.groups[part.group].planes[plane.plane].heads * head_bytes
    start = pool.part_offset(rank) + own.row_offset(part.group, plane.plane, layer, 0)
    return Place(
        start=start + heads.start * head_bytes,
        layer=own.slots * row,
        layers=part.layers,
        step=tokens * row,
        nbytes=tokens * len(heads) * head_bytes,
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
    whole = whole and memory.map.ranks == 1
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
    copies = max(memory.map.copies(section.part.group, plane.plane) for plane in planes)
    places = [
        [places_of(memory.map, section.part, plane, end, tokens, copy) for plane in planes]
        for copy in range(copies)
    ]
    row_bytes = gcd(*(place.grain for copy in places for each in copy for place in each))
    pieces = row_index(side.tables[section.part.group], section, side.block_size, tokens).numpy()
    pool = pool_rows(memory, row_bytes)
    index, *others = [_rows_of_planes(copy, pieces, row_bytes) for copy in places]
    assert not index.size or index.max() < len(pool), (index.max(), len(pool))
    return Rows(pool=pool, index=index, others=tuple(others))


def _rows_of_planes(planes: Sequence[Sequence[Place]], pieces: Index, row_bytes: int) -> Index:
    return np.concatenate([_rows_of_plane(each, pieces, row_bytes) for each in planes], axis=1)


def _rows_of_plane(places: Sequence[Place], pieces: Index, row_bytes: int) -> Index:
    """`[layers, rows of a layer]`: by piece, in each by rank"""
    rows = [place.rows(pieces, row_bytes) for place in places]
    each = rows[0] if len(rows) == 1 else np.concatenate(rows, axis=2)
    return each.reshape(len(each), -1)


class BlockRows:
    """Whole blocks of every group, in their canonical order, over the rows of `memory`."""

    def __init__(self, memory: KvMemory) -> None:
        pool = memory.map
        by_copy = [[*_block_pieces(pool, copy)] for copy in range(pool.most_copies)]
        starts = [[piece[0] for piece in pieces] for pieces in by_copy]
        _, sizes, steps, groups = [*zip(*by_copy[0], strict=True)]  # of all copies
        row_bytes = gcd(*(start for each in starts for start in each), *sizes, *steps)
        counts = [size // row_bytes for size in sizes]
        self._pool = pool_rows(memory, row_bytes)
        self._firsts = [_rows_from(each, counts, row_bytes) for each in starts]
        self._step = np.repeat([step // row_bytes for step in steps], counts)
        self._group = np.repeat(groups, counts)

    def of(self, blocks: Sequence[Sequence[int]]) -> Rows:
        """`blocks[i][g]` is the `i`-th block's place in group `g`."""
        ids = np.array(blocks, dtype=np.int64)
        assert ids.size == 0 or ids.min() >= 0, "a block that isn't held"
        ahead = self._step * ids[:, self._group]
        index, *others = [first + ahead for first in self._firsts]
        return Rows(pool=self._pool, index=index, others=tuple(others))


def _rows_from(starts: Sequence[int], counts: Sequence[int], row_bytes: int) -> Index:
    """Which rows the pieces are that begin at these bytes."""
    return np.concatenate(
        [start // row_bytes + np.arange(n) for start, n in zip(starts, counts, strict=True)]
    )


def _block_pieces(pool: PoolMap, copy: int) -> Iterator[tuple[int, int, int, int]]:
    """(where block 0 has it, its bytes, bytes from block to block, group) of each piece of a block:
    of each layer's planes, token by token and rank by rank where several ranks share the heads"""
    tokens = pool.layout.block_size if pool.ranks == 1 else 1
    for index, group in enumerate(pool.layout.groups):
        for layer in range(len(group.layers)):
            for plane in range(len(group.planes)):
                for token in range(0, pool.layout.block_size, tokens):
                    for rank in pool.holders(index, plane, copy):
                        part = pool.parts[rank]
                        row = part.token_bytes(index, plane)
                        start = pool.part_offset(rank) + part.row_offset(index, plane, layer, token)
                        yield start, tokens * row, pool.layout.block_size * row, index
