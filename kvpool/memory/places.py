"""Where the pieces of a section's planes lie in a pool in host memory, as rows of one length. Pure.

A worker's sections ask the same again and again, of other layers or other blocks: what does not
depend on these is found once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np
from numpy.typing import NDArray

from kvpool.pool.map import PoolMap
from kvpool.reslice import End, PlaneSlice

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a plane's pieces lie in the pool, in bytes: the `i`-th piece of the group's `l`-th
    layer at `start + l x layer + i x step`."""

    start: int
    layer: int
    step: int
    nbytes: int  # of a piece

    @property
    def grain(self) -> int:
        """What all of these are multiples of."""
        return gcd(self.start, self.layer, self.step, self.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PieceRows:
    """The rows of one plane's piece, one after another: those of the `i`-th piece of the `l`-th
    layer are `first + l x layer + i x step`."""

    first: Index
    layer: Index
    step: Index

    @staticmethod
    def of(places: Sequence[Place], row_bytes: int) -> PieceRows:
        """`places`: of the ranks that share the plane's heads, in their order."""
        rows = [place.nbytes // row_bytes for place in places]
        first = [np.arange(n) + at.start // row_bytes for at, n in zip(places, rows, strict=True)]
        return PieceRows(
            first=np.concatenate(first),
            layer=np.repeat([place.layer // row_bytes for place in places], rows),
            step=np.repeat([place.step // row_bytes for place in places], rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartRows:
    """A pool of `rows` rows: `copies[c][p]` are those of a piece of the `p`-th plane, where its
    heads lie for the `c`-th time."""

    row_bytes: int
    rows: int
    layers: int  # of the group
    copies: tuple[tuple[PieceRows, ...], ...]

    def of(self, pieces: Index) -> LayerRows:
        """Of these pieces."""
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
    """Of pieces of `tokens` slots; where only some of a rank's heads travel, or several ranks hold
    them, of one slot."""
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
) -> list[Place]:
    """One for each rank that holds some of the heads, in their order."""
    total = pool.layout.groups[group].planes[plane.plane].heads
    first = plane.first_head(end)
    found = []
    for rank in pool.holders(group, plane.plane, copy):
        held = pool.held(group, plane.plane, rank)
        heads = range(max(first, held.start), min(first + plane.heads, held.stop))
        if heads:
            assert tokens == 1 or heads == range(total), (tokens, heads, total)
            inside = range(heads.start - held.start, heads.stop - held.start)
            found.append(_place(pool, rank, group, plane, inside, tokens))
    return found


def _place(
    pool: PoolMap, rank: int, group: int, plane: PlaneSlice, heads: range, tokens: int
) -> Place:
    """`heads` are the rank's own numbers."""
    own = pool.parts[rank]
    head_bytes = plane.dim * own.layout.element_bytes
    row = own.layout.groups[group].planes[plane.plane].heads * head_bytes
    start = pool.part_offset(rank) + own.row_offset(group, plane.plane, 0, 0)
    return Place(
        start=start + heads.start * head_bytes,
        layer=own.slots * row,
        step=tokens * row,
        nbytes=tokens * len(heads) * head_bytes,
    )
