"""Every slab token is written exactly once, from where a naive walk over the table finds it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.layout.layout import BlockId, KvLayout, LayerGroup, Plane
from kvpool.core.transfer.write import TokenRun, chunk_bytes, token_runs


@st.composite
def requests(draw: st.DrawFn) -> tuple[tuple[BlockId, ...], int, int, int]:
    block_size = draw(st.sampled_from([1, 3, 8, 16]))
    table = draw(st.lists(st.integers(0, 30), unique=True, max_size=12))
    start = draw(st.integers(0, len(table) * block_size))
    tokens = draw(st.integers(0, len(table) * block_size - start))
    return tuple(BlockId(b) for b in table), start, tokens, block_size


@given(requests())
def test_runs_equal_a_walk_token_by_token(
    request_: tuple[tuple[BlockId, ...], int, int, int],
) -> None:
    table, start, tokens, size = request_
    naive = [table[t // size] * size + t % size for t in range(start, start + tokens)]
    planned: list[int | None] = [None] * tokens
    for run in token_runs(table, start, tokens, size):
        for i in range(run.tokens):
            assert planned[run.position + i] is None, "a slab token was written twice"
            planned[run.position + i] = run.slot + i
    assert planned == naive


@given(requests())
def test_runs_are_as_long_as_they_can_be(
    request_: tuple[tuple[BlockId, ...], int, int, int],
) -> None:
    runs = token_runs(*request_)
    assert all(run.tokens > 0 for run in runs)
    for before, after in pairwise(runs):
        assert before.slot + before.tokens != after.slot


def test_adjacent_blocks_merge_and_others_do_not() -> None:
    table = tuple(BlockId(b) for b in (4, 5, 6, 2, 3, 9))
    assert token_runs(table, 3, 18, 4) == (
        TokenRun(slot=19, position=0, tokens=9),
        TokenRun(slot=8, position=9, tokens=8),
        TokenRun(slot=36, position=17, tokens=1),
    )


def test_no_tokens_need_no_copies() -> None:
    assert token_runs((), 0, 0, 16) == ()


def test_chunk_bytes_count_every_group_and_plane() -> None:
    mla = LayerGroup(
        layers=(0, 1),
        planes=(Plane(name="latent", heads=1, dim=7), Plane(name="r", heads=1, dim=2)),
    )
    full = LayerGroup(layers=(2,), planes=(Plane(name="k", heads=2, dim=5),))
    layout = KvLayout(groups=(mla, full), dtype="float16", block_size=16)
    assert chunk_bytes(layout, 3) == 3 * 2 * (2 * 9 + 10)
