"""Attention is divided evenly among programs, whatever the lengths, and nothing is left out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.triton.work import (
    DECODE,
    Work,
    chunk_tiling,
    decode_tiling,
    divide,
    most_parts,
    most_pieces,
    query_tiles,
)

_KEYS = 64
THUNDER_MLA = (4641, 45118, 1730, 1696)


def _decode(contexts: tuple[int, ...], *, heads: int, programs: int, least: int = 1) -> Work:
    return divide(_tiles(contexts), kv_heads=heads, programs=programs, key_tile=_KEYS,
                  least_tiles=least)  # fmt: skip


def _tiles(contexts, counts=None, tile_tokens=1, window=None):  # type: ignore[no-untyped-def]
    counts = np.array(counts or [1] * len(contexts))
    ends = np.array(contexts)
    return query_tiles(
        rows=np.cumsum(counts) - counts,
        counts=counts,
        positions=ends - counts,
        tables=np.arange(len(ends)) * 1000,
        tile_tokens=tile_tokens,
        window=window,
    )


def test_a_slice_of_a_token_more_than_a_tile_has_two() -> None:
    assert _tiles((9,), [3], tile_tokens=2).rows[:, :3].tolist() == [[0, 2, 6], [2, 1, 8]]


def _programs(work: Work) -> list[np.ndarray]:  # type: ignore[type-arg]
    return [work.pieces[a:b] for a, b in zip(work.starts[:-1], work.starts[1:], strict=True)]


def _key_tiles(pieces: np.ndarray) -> int:  # type: ignore[type-arg]
    return int((-(-(pieces[:, 3] - pieces[:, 2]) // _KEYS)).sum())


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3000)), min_size=1, max_size=6),
    st.sampled_from([1, 2, 8]),
    st.integers(1, 300),
    st.sampled_from([1, 4]),
    st.none() | st.sampled_from([1, 100]),
)
def test_every_key_is_met_once_and_programs_differ_by_a_tile(
    slices: list[tuple[int, int]], heads: int, programs: int, least: int, window: int | None
) -> None:
    counts, contexts = [c for c, _ in slices], tuple(c + p for c, p in slices)
    tiles = _tiles(contexts, counts, tile_tokens=16, window=window)
    work = divide(tiles, kv_heads=heads, programs=programs, key_tile=_KEYS, least_tiles=least)
    sizes = [_key_tiles(pieces) for pieces in _programs(work)]
    busy = [size for size in sizes if size]
    assert max(busy) - min(busy) <= 1
    assert len(busy) == len(sizes) or min(busy) >= least or sum(sizes) < least
    met = np.zeros((len(tiles.rows), heads, max(contexts)), dtype=int)
    for tile, head, first, end, _ in work.pieces:
        met[tile, head, first:end] += 1
    for i, (low, high) in enumerate(zip(tiles.first_keys, tiles.end_keys, strict=True)):
        assert (met[i, :, low:high] == 1).all()
        assert met[i].sum() == heads * (high - low)
    _check_joins(work, programs)
    assert len(work.pieces) <= most_pieces(len(tiles.rows), heads, programs)


def _check_joins(work: Work, programs: int) -> None:
    """They take every part, in the slots that its pieces were given."""
    slots = work.pieces[:, 4]
    parts = work.pieces[slots >= 0]
    assert sorted(parts[:, 4]) == list(range(len(parts)))
    assert len(parts) <= most_parts(programs)
    joined = [(t, h, slot) for t, h, first, n in work.joins for slot in range(first, first + n)]
    assert sorted(joined) == sorted((t, h, slot) for t, h, _, _, slot in parts.tolist())
    whole = {(t, h) for t, h, _, _, slot in work.pieces.tolist() if slot < 0}
    assert not whole & {(t, h) for t, h, _ in joined}


def test_uneven_lengths_cost_what_even_ones_do() -> None:
    """ThunderMLA's batch, on an H200's 132 multiprocessors: the slowest program's tokens."""
    even = (sum(THUNDER_MLA) // 4,) * 4
    most = []
    for contexts in (THUNDER_MLA, even):
        work = _decode(contexts, heads=8, programs=132 * DECODE.per_processor, least=4)
        tokens = [int((p[:, 3] - p[:, 2]).sum()) for p in _programs(work)]
        assert max(tokens) - min(tokens) <= 2 * _KEYS  # a tile, and what the last ones lack
        most.append(max(tokens))
    assert most[0] <= 1.02 * most[1]


def test_little_work_is_not_cut_finer_than_asked() -> None:
    work = _decode((512,), heads=2, programs=100, least=4)
    assert [len(p) for p in _programs(work)] == [1] * 4 + [0] * 96


def test_a_window_leaves_out_what_no_query_of_the_tile_sees() -> None:
    tiles = _tiles((1000,), [40], tile_tokens=16, window=100)
    assert tiles.first_keys.tolist() == [861, 877, 893]
    assert tiles.end_keys.tolist() == [976, 992, 1000]
    assert tiles.rows.tolist() == [[0, 16, 960, 0], [16, 16, 976, 0], [32, 8, 992, 0]]


@pytest.mark.parametrize(
    ("group", "dim", "size", "rows", "keys"),
    [(4, 128, 2, 16, 64), (1, 64, 2, 16, 64), (3, 128, 4, 16, 32), (71, 64, 2, 128, 64)],
)
def test_decode_tilings(group: int, dim: int, size: int, rows: int, keys: int) -> None:
    tiling = decode_tiling(group, dim, size)
    assert (tiling.rows, tiling.keys) == (rows, keys)


def test_chunk_tilings_are_of_few_kinds() -> None:
    assert chunk_tiling(512, 4, 128, 2).rows == chunk_tiling(5, 4, 128, 2).rows == 64
    assert chunk_tiling(512, 4, 256, 2).rows == 64
    assert chunk_tiling(512, 71, 256, 2).rows == 128
    assert chunk_tiling(4, 4, 128, 2) == decode_tiling(4, 128, 2)
