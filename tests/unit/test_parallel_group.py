"""Sums over the board and over gloo, what of a step is told, and which degrees there are. The ranks
are threads here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from engine.parallel.board import PLACE_BYTES, Board, board_bytes
from engine.parallel.degree import check_degree
from engine.parallel.group import Group
from engine.parallel.message import decode_step, encode_step
from engine.parallel.share import profile_of_all
from engine.sizing import MemoryProfile
from engine.step import SampleRequest, SequenceSlice
from kvpool.layout import NO_BLOCK, BlockId
from kvrelay.errors import ModelError, PeerError
from kvrelay.types import RequestKey, Sampling

T = TypeVar("T")

SIZE = 3
LARGE = PLACE_BYTES // 4 + 1


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[list[Group]]:
    groups = [Group(rank, SIZE, tmp_path / "meeting") for rank in range(SIZE)]
    memory = torch.zeros(board_bytes(SIZE), dtype=torch.uint8)
    on_all(groups, lambda group: group.connect(memory))
    yield groups
    for group in groups:
        group.close()


def on_all(groups: list[Group], work: Callable[[Group], T]) -> list[T]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups))


@pytest.mark.parametrize("elements", [1, 1000, LARGE], ids=["one", "some", "large"])
def test_parts_are_added_up_and_joined(groups: list[Group], elements: int) -> None:
    def part(group: Group) -> torch.Tensor:
        return torch.full((1, elements), float(group.rank + 1))

    outputs = SIZE * elements - 1
    for _ in range(5):
        for whole in on_all(groups, lambda group: group.sum(part(group))):
            assert torch.equal(whole, torch.full((1, elements), 6.0))
        for joined in on_all(groups, lambda group: group.join(part(group), outputs)):
            whole = torch.cat([part(group) for group in groups], dim=-1)
            assert torch.equal(joined, whole[:, :outputs])


def test_sums_follow_one_another_whoever_is_late(groups: list[Group]) -> None:
    """A place is not written again before all have read it."""

    def run(group: Group) -> list[float]:
        late = torch.Generator().manual_seed(group.rank)
        found = []
        for step in range(400):
            if torch.rand((), generator=late) < 0.2:
                torch.randn(200, 200).sum()
            found.append(float(group.sum(torch.full((1, 64), float(step))).mean()))
        return found

    assert on_all(groups, run) == [[float(SIZE * step) for step in range(400)]] * SIZE


def test_sixteen_bits_are_added_in_thirty_two(groups: list[Group]) -> None:
    parts = [torch.tensor([[256.0 if group.rank == 0 else 0.75]]).bfloat16() for group in groups]
    for whole in on_all(groups, lambda group: group.sum(parts[group.rank])):
        assert whole.item() == 258.0, "256 + 0.75 is 256 in bfloat16"


def test_who_waits_for_a_rank_that_is_gone_hears_of_it(groups: list[Group]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(groups[0].sum, torch.ones(1, 1))
        groups[0].give_up()
        with pytest.raises(PeerError, match="gone"):
            waiting.result(10)


def test_a_rank_that_hangs_is_waited_for_only_so_long() -> None:
    board = Board(torch.zeros(board_bytes(2), dtype=torch.uint8), 0, 2, timeout_s=0.01)
    with pytest.raises(PeerError, match="hangs"):
        board.sum(torch.ones(1, 1))


def piece(token_ids: tuple[int, ...], start: int, tables: object, samples: int) -> SequenceSlice:
    request = SampleRequest(
        sampling=Sampling(max_tokens=1, seed=0),
        choice=0,
        index=0,
        prompt_ids=(1, 2),
        emitted_ids=(),
    )
    return SequenceSlice(
        key=RequestKey("a", 0),
        choice=0,
        token_ids=token_ids,
        start=start,
        tables=tables,  # type: ignore[arg-type]
        samples=(request,) * samples,
    )


@pytest.mark.parametrize("is_long", [False, True])
def test_a_step_is_told_as_it_is(is_long: bool) -> None:
    table = (NO_BLOCK, BlockId(7), BlockId(2**30))
    slices = [
        piece((5,), 40, (table, table[:0]), 2),
        piece((9, 8, 7), 0, ((BlockId(3),), (BlockId(4),)), 0),
    ]
    told, told_long = decode_step(encode_step(slices, is_long))
    assert told_long is is_long
    for ours, theirs in zip(slices, told, strict=True):
        assert theirs.token_ids == ours.token_ids
        assert (theirs.start, theirs.tables) == (ours.start, ours.tables)
        assert bool(theirs.samples) == bool(ours.samples)


def test_a_host_holds_all_ranks(groups: list[Group]) -> None:
    measured = MemoryProfile(
        total_bytes=1000, weight_bytes=100, activation_bytes=10, staging_bytes=5
    )
    assert profile_of_all(measured, None) == measured
    assert profile_of_all(measured, groups[0]) == MemoryProfile(
        total_bytes=1200, weight_bytes=300, activation_bytes=30, staging_bytes=15
    )


@pytest.mark.parametrize(("heads", "kv_heads", "degrees"), [(32, 8, 8), (9, 3, 3), (8, 8, 4)])
def test_a_degree_divides_all_heads(heads: int, kv_heads: int, degrees: int) -> None:
    check_degree(degrees, "llama", [heads], [kv_heads])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "choices"),
    [([9], [3], "1 or 3"), ([32], [1], "1"), ([8], [2, 3], "1")],
)
def test_the_degrees_there_are_get_named(
    heads: list[int], kv_heads: list[int], choices: str
) -> None:
    with pytest.raises(ModelError, match=rf"parallel\.tensor 2 .* choose {choices}$"):
        check_degree(2, "llama", heads, kv_heads)
