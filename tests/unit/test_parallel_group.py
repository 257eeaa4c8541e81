"""Sums over the board and over gloo, what of a step is told, and which degrees there are. The ranks
are threads here."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from engine.core.step import SampleRequest, SequenceSlice
from engine.device.group import Group, Line
from engine.parallel import message, nccl_group, nccl_line, ranks
from engine.parallel.channel import Channel
from engine.parallel.grid import Grid
from engine.parallel.host_group import PLACE_BYTES
from engine.parallel.message import StepHearer, StepKind, StepTeller
from engine.parallel.nccl_group import NcclGroup, side_by_side
from engine.parallel.nccl_line import NcclLine
from engine.parallel.opening import OwnRank, open_rank
from engine.parallel.ranks import check_gpus, rank_devices
from engine.parallel.split import check_degree
from kvpool.core.layout.layout import NO_BLOCK, BlockId, KvLayout, LayerGroup, Plane, Tables
from kvpool.core.transfer.pool_map import PoolMap
from kvrelay.errors import ModelError, PeerError
from kvrelay.types import RequestKey, Sampling
from tests.unit.apart_kit import open_gloo

One = TypeVar("One")
T = TypeVar("T")

SIZE = 3
LARGE = PLACE_BYTES // 4 + 1


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[list[Group]]:
    groups = [_group("cpu", rank, SIZE, tmp_path) for rank in range(SIZE)]
    memory = torch.zeros(groups[0].shared_bytes, dtype=torch.uint8)
    on_all(groups, lambda group: group.connect(memory))
    yield groups
    for group in groups:
        group.close()


def _group(device: str, rank: int, size: int, meeting: Path) -> Group:
    """Rank 0 is in the only stage there is."""
    group = open_rank(device, rank, Grid(tensor=size), meeting).group
    assert group is not None
    return group


def on_all(groups: Sequence[One], work: Callable[[One], T]) -> list[T]:
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


@pytest.mark.parametrize("elements", [1, LARGE], ids=["one", "large"])
def test_a_rank_that_hangs_is_waited_for_only_so_long(groups: list[Group], elements: int) -> None:
    bound_s = 0.1 if elements == LARGE else 2.0  # in which the other one of the two is there
    on_all(groups[:2], lambda group: group.bound(bound_s))
    on_all(groups[:2], lambda group: given_up(group, elements))


def given_up(group: Group, elements: int) -> None:
    late = "a rank" if elements == LARGE else "rank 2"
    with pytest.raises(PeerError, match=f"{late} is gone, or hangs"):
        group.sum(torch.ones(1, elements))


def piece(
    token_ids: tuple[int, ...], start: int, tables: Tables, samples: int, *, name: str = "a"
) -> SequenceSlice:
    request = SampleRequest(
        sampling=Sampling(max_tokens=1, seed=0),
        choice=0,
        prompt_ids=(1, 2),
        emitted_ids=(),
    )
    return SequenceSlice(
        key=RequestKey(name, 0),
        choice=0,
        token_ids=token_ids,
        start=start,
        tables=tables,
        samples=(request,) * samples,
    )


def blocks(*ids: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(i) for i in ids)


def assert_told(slices: list[SequenceSlice], told: list[SequenceSlice]) -> None:
    for ours, theirs in zip(slices, told, strict=True):
        assert theirs.token_ids == ours.token_ids
        assert (theirs.start, theirs.tables) == (ours.start, ours.tables)
        assert bool(theirs.samples) == bool(ours.samples)


@pytest.mark.parametrize("kind", [StepKind(*flags) for flags in product((False, True), repeat=3)])
def test_a_step_is_told_as_it_is(kind: StepKind) -> None:
    table = (NO_BLOCK, BlockId(7), BlockId(2**30))
    slices = [
        piece((5,), 40, (table, table[:0]), 2),
        piece((9, 8, 7), 0, (blocks(3), blocks(4)), 0, name="b"),
    ]
    told, told_kind = StepHearer().decode(StepTeller().encode(slices, kind))
    assert told_kind == kind
    assert_told(slices, told)


def test_only_what_is_new_of_a_table_is_told() -> None:
    teller, hearer = StepTeller(), StepHearer()
    table = blocks(*range(100))
    first = [piece((5,), 1599, (table,), 1)]
    whole = teller.encode(first, StepKind())
    (told,), _ = hearer.decode(whole)
    again = teller.encode(first, StepKind())
    assert len(whole) - len(again) == 4 * (2 + 100)
    (same,), _ = hearer.decode(again)
    assert same.tables is told.tables, "what others cache by it is found"
    grown = [piece((6,), 1600, ((*table, BlockId(7)),), 1)]
    message = teller.encode(grown, StepKind())
    assert len(message) == len(again) + 4 * (2 + 1)
    assert_told(grown, hearer.decode(message)[0])


def test_those_that_run_are_remembered_whoever_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message, "_SPARE_ROWS", 1)
    teller, table = StepTeller(), blocks(*range(50))
    told = []
    for number in range(5):
        told.append(len(teller.encode([piece((5,), 799, (table,), 1)], StepKind())))
        teller.encode([piece((5,), 15, (blocks(99),), 1, name=f"other {number}")], StepKind())
    assert set(told[1:]) == {told[0] - 4 * (2 + 50)}


def random_tables(letters: random.Random, old: Tables) -> Tables:
    """Kept, grown, cut, a window's first blocks gone, or quite others."""
    grown = tuple((*table, BlockId(letters.randrange(99))) for table in old)
    gone = tuple((NO_BLOCK, *table[1:]) for table in old)
    shorter = tuple(table[:-1] for table in old)
    others = tuple(blocks(*(letters.randrange(99) for _ in range(4))) for _ in old)
    return letters.choice([old, grown, gone, shorter, others])


def test_tables_are_right_however_they_change_and_whoever_comes_and_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(message, "_SPARE_ROWS", 3)
    letters, teller, hearer = random.Random(3), StepTeller(), StepHearer()
    held = {str(i): (blocks(1, 2), blocks(3)) for i in range(12)}
    for _ in range(300):
        names = letters.sample(sorted(held), letters.randint(1, 6))
        for name in names:
            held[name] = random_tables(letters, held[name])
        slices = [piece((1, 2), 0, held[name], 1, name=name) for name in names]
        slices.append(piece((3,), 2, random_tables(letters, held[names[0]]), 1, name=names[0]))
        assert_told(slices, hearer.decode(teller.encode(slices, StepKind()))[0])
    assert len(hearer._rows) <= 7 + 3 + 7, "rows are used again"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "degree"),
    [(32, 8, 8), (9, 3, 3), (8, 8, 4), (32, 8, 16), (9, 3, 9), (8, 1, 4)],
)
def test_a_degree_divides_all_heads_and_has_whole_ones_for_kv(
    heads: int, kv_heads: int, degree: int
) -> None:
    check_degree(degree, "llama", [heads], [kv_heads])


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "choices"),
    [
        (2, [9], [3], "1 or 3 or 9"),
        (4, [6], [2], "1 or 2 or 6"),
        (2, [8], [2, 3], "1"),
        (4, [16], [8, 6], "1 or 2"),
    ],
)
def test_the_degrees_there_are_get_named(
    size: int, heads: list[int], kv_heads: list[int], choices: str
) -> None:
    with pytest.raises(ModelError, match=rf"parallel\.tensor {size} .* choose {choices}$"):
        check_degree(size, "llama", heads, kv_heads)


def test_each_rank_has_its_device(tmp_path: Path) -> None:
    assert rank_devices("cpu", Grid(tensor=3)) == ("cpu",) * 3
    assert rank_devices("cuda", Grid(tensor=2)) == ("cuda:0", "cuda:1")
    assert isinstance(_group("cuda:1", 1, 2, tmp_path), NcclGroup)


@pytest.mark.parametrize(
    ("count", "reached", "message"),
    [
        (1, True, "each rank needs a GPU, 2 in all, and torch sees 1: .*resources.GPU"),
        (2, False, "cuda:0 can't reach the memory of cuda:1: .*CUDA_VISIBLE_DEVICES"),
    ],
)
def test_gpus_that_can_not_serve_are_refused(
    count: int, reached: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda ours, theirs: reached)
    with pytest.raises(ModelError, match=f"2 ranks on cuda: {message}"):
        check_gpus(Grid(tensor=2))


def test_what_is_asked_of_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's own part runs on GPUs alone."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(nccl_group, "open_nccl", open_gloo)
    cpu, meeting = torch.device("cpu"), tmp_path / "meeting"
    groups: list[Group] = [NcclGroup(cpu, rank, SIZE, meeting) for rank in range(SIZE)]
    on_all(groups, lambda group: group.connect(torch.zeros(0)))
    on_all(groups, lambda group: group.bound(5.0))
    parts = [torch.full((1, 2, 4), float(rank + 1)) for rank in range(SIZE)]
    joined = torch.cat(parts, dim=-1)[..., :11]
    for found in on_all(groups, lambda group: group.join(parts[group.rank], 11)):
        assert torch.equal(found, joined)
    for found in on_all(groups, lambda group: group.sum(parts[group.rank])):
        assert torch.equal(found, torch.full((1, 2, 4), 6.0))
    groups[0].give_up()
    assert groups[0]._nccl.aborted  # type: ignore[attr-defined]


GRID = Grid(stages=3)


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Line]]:
    """# rank |-> its line; rank 2 is the first stage"""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(nccl_line, "open_nccl", open_gloo)
    cpu = torch.device("cpu")
    lines: list[Line] = [NcclLine(cpu, GRID, rank, tmp_path / "line") for rank in range(3)]
    on_all(lines, lambda line: line.connect())
    on_all(lines, lambda line: line.bound(5.0))
    yield lines
    for line in lines:
        line.close()


def test_hidden_states_go_from_stage_to_stage_in_order(lines: list[Line]) -> None:
    """Each adds its own number."""
    steps = [torch.full((1, rows, 4), float(rows), dtype=torch.bfloat16) for rows in (3, 1, 2)]

    def run(line: Line) -> list[torch.Tensor]:
        rank, found = lines.index(line), []
        for step in steps:
            hidden = step if rank == 2 else line.receive((*step.shape,), step.dtype)
            if rank > 0:
                line.send(hidden + rank)
            found.append(hidden)
        return found

    for step, found in zip(steps, on_all(lines, run)[0], strict=True):
        assert torch.equal(found, step + 3)


def test_a_line_is_bounded_and_given_up(lines: list[Line]) -> None:
    middle: Any = lines[1]
    assert middle._nccl.timeout_s == 5.0
    middle.give_up()
    assert middle._nccl.aborted


class Way:
    """Of NCCL: it ends only when the other one ends too."""

    def __init__(self, both: Barrier) -> None:
        self._both = both
        self.done: list[str] = []

    def bound(self, timeout_s: float) -> None:
        self.done.append(f"bound {timeout_s:g}")

    def give_up(self) -> None:
        self._both.wait(10)
        self.done.append("given up")

    def close(self) -> None:
        self.done.append("closed")


def test_sums_and_hidden_states_are_given_up_at_once_and_before_they_are_closed() -> None:
    both = Barrier(2)
    group, line = Way(both), Way(both)
    ways: Any = {"group": group, "line": line}
    own = OwnRank(rank=0, grid=Grid(tensor=2, stages=3), **ways)
    own.bound(5.0)
    own.close()
    assert group.done == line.done == ["bound 15", "given up", "closed"]


def test_rank_0_reaches_the_kv_on_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handles go by the channel; what CUDA makes of them is a table here."""
    layout = KvLayout(
        groups=(LayerGroup(layers=(0, 1), planes=(Plane(name="k", heads=1, dim=4),)),),
        dtype="float32",
        block_size=16,
    )
    pool, shared = PoolMap(layout=layout, blocks=3, ranks=3), {}

    def handle(number: bytes) -> SimpleNamespace:
        return SimpleNamespace(pack=lambda: number, map=lambda device: shared[number])

    def share(memory: torch.Tensor) -> SimpleNamespace:
        number = bytes([len(shared) + 1])
        shared[number] = memory
        return handle(number)

    monkeypatch.setattr(ranks, "share", share)
    monkeypatch.setattr(ranks.CudaHandle, "unpack", staticmethod(handle))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    lines = [[Channel(end) for end in socket.socketpair()] for _ in range(2)]
    cpu = torch.device("cpu")
    theirs = [ranks.offer_part(pool.parts[rank], cpu, lines[rank - 1][1]) for rank in range(1, 3)]
    assert [ours.receive_facts() for ours, _ in lines] == [{"done": True}] * 2
    whole = ranks.map_parts(pool, cpu, [ours for ours, _ in lines])
    assert whole.lies_apart
    for part, their in zip(whole.parts[1:], theirs, strict=True):
        assert part.planes[0][0].data_ptr() == their.planes[0][0].data_ptr()
    for end in (end for line in lines for end in line):
        end.close()


def test_parts_of_all_gpus_are_put_side_by_side() -> None:
    parts = torch.arange(12).view(3, 2, 2)  # [ranks, rows, n]
    assert side_by_side(parts).tolist() == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
