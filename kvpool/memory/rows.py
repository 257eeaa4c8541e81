"""Copies rows, bit by bit, between a pool in host memory and a slab. Runs in the worker that owns
the blocks.

All data is seen as rows of one length. So the copies of a section are one call of numpy, which
moves a row at a time: twice as fast as PyTorch's indexing, which moves an element at a time.

A worker's sections ask for the same rows again and again, for other layers or blocks; the part that
does not depend on these is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray

from kvpool.core.layout.shards import End, PlaneSlice
from kvpool.core.transfer.pool_map import PoolMap
from kvpool.core.transfer.write import Side, SlabSection
from kvpool.memory.kv_memory import KvMemory
from kvpool.memory.views import BlockPieces, pieces_of

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanePlace:
    """The pieces of a plane in the pool, in bytes: the `i`-th piece of the group's `l`-th layer is
    at `start + l x layer + i x step`."""

    start: int
    layer: int
    step: int
    nbytes: int  # of a piece

    @property
    def grain(self) -> int:
        """The greatest common divisor of these numbers."""
        return gcd(self.start, self.layer, self.step, self.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PieceRows:
    """Consecutive rows of one plane's pieces: those of the `i`-th piece of the `l`-th layer are
    `first + l x layer + i x step`."""

    first: Index
    layer: Index
    step: Index

    @staticmethod
    def of(places: Sequence[PlanePlace], row_bytes: int) -> PieceRows:
        """`places`: those of the ranks that share the plane's heads, in their order."""
        rows = [place.nbytes // row_bytes for place in places]
        first = [np.arange(n) + at.start // row_bytes for at, n in zip(places, rows, strict=True)]
        return PieceRows(
            first=np.concatenate(first),
            layer=np.repeat([place.layer // row_bytes for place in places], rows),
            step=np.repeat([place.step // row_bytes for place in places], rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartRows:
    """A pool of `rows` rows: `copies[c][p]` are those of a piece of the `p`-th plane in the `c`-th
    copy of its heads."""

    row_bytes: int
    rows: int
    layers: int  # of the group
    copies: tuple[tuple[PieceRows, ...], ...]

    def of(self, pieces: Index) -> LayerRows:
        """The rows of these pieces."""
        copies = tuple(
            (
                np.concatenate([(at.first + at.step * pieces[:, None]).ravel() for at in planes]),
                np.concatenate([np.tile(at.layer, len(pieces)) for at in planes]),
            )
            for planes in self.copies
        )
        last = max((first + (self.layers - 1) * layer).max(initial=-1) for first, layer in copies)
        assert last < self.rows, (last, self.rows)
        return LayerRows(layers=self.layers, copies=copies)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerRows:
    """The rows of some pieces, plane by plane: of the `l`-th layer `first + l x layer`, for each
    copy's two."""

    layers: int  # of the group
    copies: tuple[tuple[Index, Index], ...]

    def index(self, first_layer: int, layers: int) -> list[Index]:
        """`[layers, rows of a layer]` for each copy."""
        assert first_layer + layers <= self.layers, (first_layer, layers, self.layers)
        numbers = np.arange(first_layer, first_layer + layers)[:, None]
        return [first + numbers * layer for first, layer in self.copies]


@lru_cache(maxsize=256)
def part_rows(
    pool: PoolMap, group: int, planes: tuple[PlaneSlice, ...], end: End, tokens: int
) -> PartRows:
    """For pieces of `tokens` slots; of one slot if only some of a rank's heads travel, or several
    ranks hold them."""
    copies = max(pool.copies(group, plane.plane) for plane in planes)
    places = [
        [places_of(pool, group, plane, end, tokens, copy) for plane in planes]
        for copy in range(copies)
    ]
    row_bytes = gcd(*(place.grain for copy in places for each in copy for place in each))
    return PartRows(
        row_bytes=row_bytes,
        rows=pool.nbytes // row_bytes,
        layers=len(pool.layout.groups[group].layers),
        copies=tuple(tuple(PieceRows.of(each, row_bytes) for each in copy) for copy in places),
    )


def places_of(
    pool: PoolMap, group: int, plane: PlaneSlice, end: End, tokens: int, copy: int
) -> list[PlanePlace]:
    """One for each rank that holds some of the heads, in their order."""
    total = pool.layout.groups[group].planes[plane.plane].heads
    first = plane.first_head(end)
    found = []
    for share in pool.shares(group, plane.plane, copy):
        held = share.heads
        heads = range(max(first, held.start), min(first + plane.heads, held.stop))
        if heads:
            assert tokens == 1 or heads == range(total), (tokens, heads, total)
            inside = range(heads.start - held.start, heads.stop - held.start)
            found.append(_place(pool, share.rank, group, plane, inside, tokens))
    return found


def _place(
    pool: PoolMap, rank: int, group: int, plane: PlaneSlice, heads: range, tokens: int
) -> PlanePlace:
    """`heads` are the rank's own numbers."""
    own = pool.parts[rank]
    head_bytes = plane.dim * own.layout.element_bytes
    row = own.layout.groups[group].planes[plane.plane].heads * head_bytes
    start = pool.part_offset(rank) + own.row_offset(group, plane.plane, 0, 0)
    return PlanePlace(
        start=start + heads.start * head_bytes,
        layer=own.slots * row,
        step=tokens * row,
        nbytes=tokens * len(heads) * head_bytes,
    )


_Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlabRows:
    """Slab row `[l, r]` is the pool's row `index[l, r]`, and each of the `others`.

    `pool` is `[pool rows, row bytes]`, `index` `[layers, rows of a layer]` and so are the `others`:
    where heads have copies.
    """

    pool: _Bytes
    index: Index
    others: tuple[Index, ...] = ()

    def part(self, layers: slice, rows: slice) -> SlabRows:
        others = tuple(other[layers, rows] for other in self.others)
        return SlabRows(pool=self.pool, index=self.index[layers, rows], others=others)

    def gather(self, slab: torch.Tensor) -> None:
        """Copies into `slab`, contiguous, of any dtype."""
        rows = self._of(slab)
        np.take(self.pool, self.index.ravel(), axis=0, out=rows, mode="clip")

    def scatter(self, slab: torch.Tensor) -> None:
        """The inverse. Only the blocks' owner calls it."""
        rows = self._of(slab)
        for index in (self.index, *self.others):
            self.pool[index.ravel()] = rows

    def _of(self, slab: torch.Tensor) -> _Bytes:
        rows: _Bytes = slab.view(-1).view(torch.uint8).numpy()
        return rows.reshape(self.index.size, self.pool.shape[1])


def pool_rows(memory: KvMemory, row_bytes: int) -> _Bytes:
    """`[rows, row_bytes]`, without the rest at the end."""
    flat: _Bytes = memory.flat.numpy()
    return flat[: len(flat) // row_bytes * row_bytes].reshape(-1, row_bytes)


def section_rows(memory: KvMemory, section: SlabSection, side: Side, end: End) -> SlabRows:
    """All planes, for each layer. Rows are as long as alignment allows: whole blocks, parts of
    blocks, tokens, or parts of a token if only some of its heads travel."""
    part, planes = section.part, memory.layout.groups[section.part.group].planes
    whole = all(plane.heads == planes[plane.plane].heads for plane in part.planes)
    whole = whole and memory.map.ranks == 1
    tokens = gcd(side.block_size, section.start, section.tokens) if whole else 1
    return _rows(memory, section, side, end, part.planes, tokens)


def plane_rows(
    memory: KvMemory, section: SlabSection, side: Side, end: End, plane: PlaneSlice
) -> SlabRows:
    """One plane, by token."""
    return _rows(memory, section, side, end, (plane,), 1)


def _rows(
    memory: KvMemory,
    section: SlabSection,
    side: Side,
    end: End,
    planes: tuple[PlaneSlice, ...],
    tokens: int,
) -> SlabRows:
    part = part_rows(memory.map, section.part.group, planes, end, tokens)
    pieces = pieces_of(side.tables[section.part.group], section, side.block_size, tokens)
    index, *others = _layer_rows(part, pieces).index(
        section.part.first_layer(end), section.part.layers
    )
    return SlabRows(pool=pool_rows(memory, part.row_bytes), index=index, others=tuple(others))


@lru_cache(maxsize=16)
def _layer_rows(part: PartRows, pieces: BlockPieces) -> LayerRows:
    return part.of(pieces.numbers())


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

    def of(self, blocks: Sequence[Sequence[int]]) -> SlabRows:
        """`blocks[i][g]` is the `i`-th block's place in group `g`."""
        ids = np.array(blocks, dtype=np.int64)
        assert ids.size == 0 or ids.min() >= 0, "a block that isn't held"
        ahead = self._step * ids[:, self._group]
        index, *others = [first + ahead for first in self._firsts]
        return SlabRows(pool=self._pool, index=index, others=tuple(others))


def _rows_from(starts: Sequence[int], counts: Sequence[int], row_bytes: int) -> Index:
    """The rows of the pieces that begin at these bytes."""
    return np.concatenate(
        [start // row_bytes + np.arange(n) for start, n in zip(starts, counts, strict=True)]
    )


def _block_pieces(pool: PoolMap, copy: int) -> Iterator[tuple[int, int, int, int]]:
    """(start of block 0's piece, its bytes, bytes from block to block, group) of each piece of a
    block: of each layer's planes, token by token and rank by rank if several ranks share the
    heads"""
    tokens = pool.layout.block_size if pool.ranks == 1 else 1
    for index, group in enumerate(pool.layout.groups):
        for layer in range(len(group.layers)):
            for plane in range(len(group.planes)):
                for token in range(0, pool.layout.block_size, tokens):
                    for share in pool.shares(index, plane, copy):
                        part, before = pool.parts[share.rank], pool.part_offset(share.rank)
                        row = part.token_bytes(index, plane)
                        start = before + part.row_offset(index, plane, layer, token)
                        yield start, tokens * row, pool.layout.block_size * row, index
