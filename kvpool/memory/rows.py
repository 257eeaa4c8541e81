"""Copies, bit by bit, between rows of a pool in host memory and rows of a slab. Runs in the worker
that owns the blocks.

Everything that travels is seen as rows of one length, so that a section's copies are one call of
numpy, which moves a row at a time: twice as fast as PyTorch's indexing, an element at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray

from kvpool.memory.kv_memory import KvMemory
from kvpool.memory.places import Index, LayerRows, PartRows, part_rows
from kvpool.memory.views import BlockPieces, pieces_of
from kvpool.pool.map import PoolMap
from kvpool.reslice import End, PlaneSlice
from kvpool.write import Section, Side

Bytes = NDArray[np.uint8]


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
    planes: tuple[PlaneSlice, ...],
    tokens: int,
) -> Rows:
    part = part_rows(memory.map, section.part.group, planes, end, tokens)
    pieces = pieces_of(side.tables[section.part.group], section, side.block_size, tokens)
    index, *others = _layer_rows(part, pieces).index(
        section.part.first_layer(end), section.part.layers
    )
    return Rows(pool=pool_rows(memory, part.row_bytes), index=index, others=tuple(others))


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
