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
    tiles = -(-counts // tile_tokens)
    owner = np.repeat(np.arange(len(counts)), tiles)
    skipped = (np.arange(len(owner)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile_tokens
    taken = np.minimum(tile_tokens, counts[owner] - skipped)
    first = positions[owner] + skipped
    found = np.stack([rows[owner] + skipped, taken, first, tables[owner]], axis=1)
    low = np.zeros_like(first) if window is None else np.maximum(0, first - window + 1)
    return QueryTiles(rows=found.astype(np.int32), first_keys=low, end_keys=first + taken)


def divide(
    tiles: QueryTiles, *, kv_heads: int, programs: int, key_tile: int, least_tiles: int = 1
) -> Work:
    """Programs differ by one tile of keys at most. None gets fewer than `least_tiles`, so that
    little work is not cut into many parts."""
    lengths = -(-(tiles.end_keys - tiles.first_keys) // key_tile)
    lengths = np.repeat(lengths, kv_heads)
    begins = np.cumsum(lengths) - lengths
    bounds = _bounds(int(lengths.sum()), programs, least_tiles)
    cuts = _distinct(np.concatenate([begins, bounds[bounds < bounds[-1]]]))
    sizes = np.diff(cuts, append=bounds[-1])
    owner = np.searchsorted(begins, cuts, side="right") - 1
    tile, head = np.divmod(owner, kv_heads)
    offset = cuts - begins[owner]
    first = tiles.first_keys[tile] + offset * key_tile
    end = np.minimum(tiles.end_keys[tile], first + sizes * key_tile)
    is_part = sizes < lengths[owner]
    slot = np.where(is_part, np.cumsum(is_part) - 1, -1)
    opening = np.flatnonzero(is_part & (offset == 0))
    parts = np.searchsorted(owner, owner[opening], side="right") - opening
    joins = np.zeros((programs, 4), dtype=np.int32)
    joins[: len(opening)] = np.stack([tile[opening], head[opening], slot[opening], parts], axis=1)
    return Work(
        pieces=np.stack([tile, head, first, end, slot], axis=1).astype(np.int32),
        starts=np.searchsorted(cuts, bounds).astype(np.int32),
        joins=joins,
    )


def _bounds(total: int, programs: int, least: int) -> _Int64s:
    """The start of each program's stretch, and the end of the last one: `[programs + 1]`."""
    used = max(1, min(programs, total // least))
    return total * np.minimum(np.arange(programs + 1), used) // used


def _distinct(values: _Int64s) -> _Int64s:
    values = np.sort(values)
    return values[np.concatenate([[True], values[1:] != values[:-1]])]


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
