"""Divides a launch's attention evenly among its programs, whatever the lengths. Pure.

A tile of queries meets the keys that it sees once for each KV head. Those meetings, in tiles of
keys, form one line, and every program gets an equal stretch of it ("stream-K"; FlashInfer and
ThunderMLA divide decode attention in the same way). Built once per step, for all layers of a group.

Tile sizes depend on head dim, dtype and the kind of work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

_Ints = NDArray[np.integer]
_Int32s = NDArray[np.int32]
_Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryTiles:
    """`rows` `[tiles, 4]`: first row, tokens, first token's position, start of its block table.
    Tile i sees keys of positions `[first_keys[i], end_keys[i])`."""

    rows: _Int32s
    first_keys: _Int64s
    end_keys: _Int64s


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Program p runs `pieces[starts[p] : starts[p + 1]]`.

    A piece is (query tile, KV head, first key, end key, slot). With a slot of -1 it covers all keys
    of its tile and head. Other pieces leave a part in their slot, and a join (query tile, KV head,
    first slot, slots) merges consecutive parts. Joins without slots do nothing.
    """

    pieces: _Int32s  # [pieces, 5]
    starts: _Int32s  # [programs + 1]
    joins: _Int32s  # [programs, 4]


def query_tiles(
    *,
    rows: _Ints,
    counts: _Ints,
    positions: _Ints,
    tables: _Ints,
    tile_tokens: int,
    window: int | None,
) -> QueryTiles:
    """Slice i has `counts[i]` tokens from row `rows[i]` and position `positions[i]` on; its blocks
    begin at `tables[i]`."""
    owner, skipped = _tiled(counts, tile_tokens)
    taken = np.minimum(tile_tokens, counts[owner] - skipped)
    first = positions[owner] + skipped
    found = _columns(rows[owner] + skipped, taken, first, tables[owner])
    low = first * 0 if window is None else np.maximum(0, first - window + 1)
    return QueryTiles(rows=found, first_keys=low, end_keys=first + taken)


def _tiled(counts: _Ints, size: int) -> tuple[_Int64s, _Int64s]:
    """The slice of each tile, and the tokens of it that are in earlier ones."""
    each = np.arange(len(counts))
    if counts.max() <= size:
        return each, each * 0
    tiles = -(-counts // size)
    owner = each.repeat(tiles)
    return owner, (np.arange(len(owner)) - (tiles.cumsum() - tiles)[owner]) * size


def divide(
    tiles: QueryTiles, *, kv_heads: int, programs: int, key_tile: int, least_tiles: int = 1
) -> Work:
    """Programs differ by one tile of keys at most. None gets fewer than `least_tiles`, so that
    little work is not cut into many parts."""
    line = _Line.of(tiles, kv_heads, key_tile)
    bounds = _bounds(line.length, programs, least_tiles)
    begun = line.begins.searchsorted(bounds, side="right") - 1  # where each program begins
    offsets = bounds - line.begins[begun]
    (cuts,) = offsets.nonzero()
    counts = 1 + np.bincount(begun[cuts], minlength=len(line.begins))
    firsts = begun + (offsets > 0).cumsum()  # pieces with which programs begin
    starts = np.empty(programs + 1, dtype=np.int32)
    starts[: len(firsts)] = firsts
    starts[len(firsts) :] = len(counts) + len(cuts)
    return Work(
        pieces=_pieces(tiles, kv_heads, counts, firsts[cuts], offsets[cuts] * key_tile),
        starts=starts,
        joins=_joins(counts, kv_heads, programs),
    )


@dataclass(frozen=True, slots=True)
class _Line:
    """All meetings, in tiles of keys. `begins`: where those of each query tile and head begin."""

    begins: _Int64s
    length: int

    @classmethod
    def of(cls, tiles: QueryTiles, kv_heads: int, key_tile: int) -> _Line:
        lengths = (-(-(tiles.end_keys - tiles.first_keys) // key_tile)).repeat(kv_heads)
        ends = lengths.cumsum()
        return cls(ends - lengths, int(ends[-1]))


def _bounds(total: int, programs: int, least: int) -> _Int64s:
    """The starts of the stretches of the programs that get one."""
    used = max(1, min(programs, total // least))
    return total * np.arange(used) // used


def _pieces(
    tiles: QueryTiles, kv_heads: int, counts: _Int64s, cuts: _Int64s, offsets: _Int64s
) -> _Int32s:
    """`counts` `[tiles x heads]` of pieces. Those at `cuts` begin `offsets` keys behind the first,
    where the ones before them end."""
    owner = np.arange(len(counts)).repeat(counts)
    tile = owner // kv_heads
    first, end = tiles.first_keys[tile], tiles.end_keys[tile]
    first[cuts] += offsets
    end[cuts - 1] = first[cuts]
    is_part = (counts > 1)[owner]
    slot = np.where(is_part, is_part.cumsum() - 1, -1)
    return _columns(tile, owner - tile * kv_heads, first, end, slot)


def _joins(counts: _Int64s, kv_heads: int, programs: int) -> _Int32s:
    (parted,) = (counts > 1).nonzero()
    tile, slots = parted // kv_heads, counts[parted]
    joins = np.zeros((programs, 4), dtype=np.int32)
    joins[: len(parted)] = _columns(tile, parted - tile * kv_heads, slots.cumsum() - slots, slots)
    return joins


def _columns(*columns: _Ints) -> _Int32s:
    """`[rows, columns]`"""
    found = np.empty((len(columns[0]), len(columns)), dtype=np.int32)
    for index, column in enumerate(columns):
        found[:, index] = column
    return found


def most_pieces(tiles: int, kv_heads: int, programs: int) -> int:
    """The largest number of pieces that `divide` makes of this many query tiles."""
    return tiles * kv_heads + programs


def most_parts(programs: int) -> int:
    """The largest number of slots that `divide` needs: each program's first and last piece may be
    parts."""
    return 2 * programs


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """`rows` of (token, head of the group) meet `keys` at a time; `per_processor` programs share a
    multiprocessor; `stages` tiles of keys are loaded ahead."""

    rows: int
    keys: int
    warps: int
    stages: int
    per_processor: int


DECODE = Tiling(rows=16, keys=64, warps=4, stages=4, per_processor=2)
"""Memory bound: each of two programs loads two tiles of keys and of values ahead. One stage is
taken by the block tables, which are loaded before."""
CHUNK = Tiling(rows=64, keys=64, warps=4, stages=3, per_processor=2)
"""Compute bound: a row of matrix units for each of two programs. The best of 38 on an H100
(`bench.engine.cuda.attention_tilings`)."""
_TILE_BYTES = 16 << 10
"""Bytes of keys in a tile of these tilings: 64 keys of 128 dims in 16 bits."""


def decode_tiling(group: int, dim: int, element_bytes: int, base: Tiling = DECODE) -> Tiling:
    """For one token of each sequence. `group`: query heads of each KV head."""
    return _fitted(replace(base, rows=_power_of_two(group, 16)), dim, element_bytes)


def chunk_tiling(
    tokens: int, group: int, dim: int, element_bytes: int, base: Tiling = CHUNK
) -> Tiling:
    """For slices of up to `tokens` tokens. There are few kinds, because each is compiled at its
    first run."""
    if tokens * group <= DECODE.rows:
        return decode_tiling(group, dim, element_bytes)
    return _fitted(replace(base, rows=_power_of_two(group, base.rows)), dim, element_bytes)


def _fitted(tiling: Tiling, dim: int, element_bytes: int) -> Tiling:
    """Fewer keys at a time if each takes more memory: shared memory then holds as many stages."""
    keys = tiling.keys
    while keys > 16 and keys * dim * element_bytes > _TILE_BYTES:
        keys //= 2
    return replace(tiling, keys=keys)


def _power_of_two(least: int, start: int) -> int:
    while start < least:
        start *= 2
    return start
