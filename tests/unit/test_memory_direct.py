"""Pieces read straight out of a peer's pool, over links that map it and links that don't."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from kvpool.core.transfer.piece import PieceBlocks, piece_blocks, source_side, transfer_shape
from kvpool.core.transfer.pool_map import KvFacts, PoolMap
from kvpool.core.transfer.write import TokenSpan
from kvpool.memory import direct
from kvpool.memory.direct import fetch
from kvpool.memory.kv_memory import KvMemory
from kvpool.transport.loopback import LoopbackEndpoint
from kvpool.transport.peer.base import Callbacks, Connection, Read, RegionName
from kvrelay.errors import PeerError
from kvrelay.types import Incarnation
from tests.unit.pieces_kit import (
    BLOCKS,
    assert_copied_alike,
    assert_moved,
    layout,
    pieces,
    random_memory,
    random_tables,
    side,
    without_unseen,
)


class Unmapped:
    """A link on which every byte is asked for; counts the descriptors."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self.reads = 0

    def window(self, region: RegionName) -> None:
        return None

    def read_many(self, reads: Sequence[Read]) -> None:
        self.reads += len(reads)
        self._link.read_many(reads)


@contextmanager
def connected() -> Iterator[tuple[LoopbackEndpoint, Connection]]:
    """The owner's end, and the reader's connection to it."""
    callbacks = Callbacks(
        on_connect=lambda c: None, on_message=lambda c, m: None, on_lost=lambda c: None
    )
    owner = LoopbackEndpoint(Incarnation("direct-o"), callbacks, 5.0)
    reader = LoopbackEndpoint(Incarnation("direct-r"), callbacks, 5.0)
    try:
        yield owner, reader.connect(owner.address)
    finally:
        reader.close()
        owner.close()


def facts(memory: KvMemory, region: str) -> KvFacts:
    return KvFacts(
        dtype=memory.layout.dtype,
        block_size=memory.layout.block_size,
        blocks=memory.blocks,
        slab_bytes=0,
        region=region,
    )


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "unmapped"])
@pytest.mark.parametrize("seed", range(12))
def test_each_token_that_is_seen_is_read_once_and_nothing_else(seed: int, mapped: bool) -> None:
    draw = random.Random(seed)
    window = draw.choice([None, 1, 8, 30])
    source = random_memory(layout(draw.choice([4, 8, 12]), window=window), seed)
    ours = layout(draw.choice([3, 8, 16]), window=window)
    target, before = random_memory(ours, 99), random_memory(ours, 99)
    prompt = draw.randrange(1, 60)
    start = draw.randrange(prompt)
    span = TokenSpan(start=start, tokens=prompt - start, next_position=prompt)
    theirs = without_unseen(random_tables(source.layout, prompt, seed), source.layout, span)
    held = without_unseen(random_tables(ours, prompt, seed + 1), ours, span)
    with connected() as (owner, link):
        kv = facts(source, owner.adopt(source.flat).name)
        reader = link if mapped else Unmapped(link)
        for _, write in pieces(ours, span, draw.choice([100, 700, 1 << 20])):
            said = piece_blocks(write.sections, theirs, source.layout.block_size)
            told = source_side(
                write.sections, said, groups=2, block_size=kv.block_size, blocks=kv.blocks
            )
            reads = reader.reads if isinstance(reader, Unmapped) else 0
            fetch(target, side(target, held), reader, kv, told, write)  # type: ignore[arg-type]
            if isinstance(reader, Unmapped):
                shape = transfer_shape(write, told, side(target, held))
                assert reader.reads - reads == shape.descriptors
    assert_moved(source, theirs, target, held, span, before)


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_pool_on_another_device_is_read_too(device: str) -> None:
    """Memory on meta has no bytes to compare: there it is only possible."""
    ours = layout(8)
    source, before = random_memory(ours, 1), random_memory(ours, 2)
    target = KvMemory.over(before.map, before.flat.clone().to(device))
    span = TokenSpan(start=0, tokens=20, next_position=20)
    theirs, held = (random_tables(ours, 20, seed) for seed in (1, 2))
    ((_, write),) = pieces(ours, span)
    with connected() as (owner, link):
        kv = facts(source, owner.adopt(source.flat).name)
        fetch(target, side(target, held), link, kv, side(source, theirs), write)
    if device == "cuda":
        there = KvMemory.over(before.map, target.flat.cpu())
        assert_moved(source, theirs, there, held, span, before)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_a_pool_on_the_same_device_is_read_in_one_launch(seed: int) -> None:
    assert_copied_alike(seed, "cuda")


@pytest.mark.gpu
def test_between_pools_on_one_device_only_the_kernel_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_fetched(monkeypatch, "cuda", "_copy_runs")


def test_between_pools_on_the_host_no_kernel_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    check_fetched(monkeypatch, "cpu", "_copy_at_once")


def check_fetched(monkeypatch: pytest.MonkeyPatch, device: str, unused: str) -> None:
    ours = layout(8)
    source, before = random_memory(ours, 1), random_memory(ours, 2)
    there, target = (KvMemory.over(m.map, m.flat.clone().to(device)) for m in (source, before))
    span = TokenSpan(start=0, tokens=20, next_position=20)
    theirs, held = (random_tables(ours, 20, seed) for seed in (1, 2))
    ((_, write),) = pieces(ours, span)
    monkeypatch.setattr(direct, unused, None)
    with connected() as (owner, link):
        kv = facts(there, owner.adopt(there.flat).name)
        fetch(target, side(target, held), link, kv, side(there, theirs), write)
    moved = KvMemory.over(before.map, target.flat.cpu())
    assert_moved(source, theirs, moved, held, span, before)


def test_a_pool_of_another_size_than_told_is_not_read() -> None:
    ours = layout(8)
    memory, tables = random_memory(ours, 1), random_tables(ours, 20, 1)
    ((_, write),) = pieces(ours, TokenSpan(start=0, tokens=20, next_position=20))
    with connected() as (owner, link):
        kv = facts(memory, owner.register(memory.flat.numel() - 256).name)
        with pytest.raises(PeerError, match=r"bytes, not .* as announced"):
            fetch(memory, side(memory, tables), link, kv, side(memory, tables), write)


def test_a_region_that_is_gone_is_an_error_of_the_peer() -> None:
    ours = layout(8)
    memory, tables = random_memory(ours, 1), random_tables(ours, 20, 1)
    ((_, write),) = pieces(ours, TokenSpan(start=0, tokens=20, next_position=20))
    with connected() as (_, link), pytest.raises(PeerError, match="has no region"):
        fetch(
            memory, side(memory, tables), link, facts(memory, "none"), side(memory, tables), write
        )


def named(group: int, first: int, count: int, block: int = 0) -> PieceBlocks:
    return PieceBlocks(group=group, first=first, runs=((block, count),))


@pytest.mark.parametrize(
    "said",
    [
        (),
        (PieceBlocks(group=0, first=0, runs=((0, 3),)),),  # the other group is missing
        (
            PieceBlocks(group=0, first=0, runs=((0, 2),)),
            PieceBlocks(group=1, first=1, runs=((0, 2),)),
        ),
        (
            PieceBlocks(group=0, first=1, runs=((0, 3),)),
            PieceBlocks(group=1, first=1, runs=((0, 2),)),
        ),
    ],
)
def test_blocks_that_do_not_cover_the_piece_are_refused(said: tuple[PieceBlocks, ...]) -> None:
    ((_, write),) = pieces(layout(8), TokenSpan(start=0, tokens=20, next_position=20))
    with pytest.raises(PeerError, match="are not named"):
        source_side(write.sections, said, groups=2, block_size=8, blocks=BLOCKS)


def test_blocks_beyond_the_pool_are_refused() -> None:
    ((_, write),) = pieces(layout(8), TokenSpan(start=0, tokens=20, next_position=20))
    said = (named(0, 0, 3, block=BLOCKS - 2), named(1, 1, 2))
    with pytest.raises(PeerError, match=f"outside a pool of {BLOCKS} blocks"):
        source_side(write.sections, said, groups=2, block_size=8, blocks=BLOCKS)


def test_planes_lie_apart_and_on_their_borders() -> None:
    memory = KvMemory(layout(8), 3, "cpu")
    ends = 0
    for group, planes in enumerate(memory.planes):
        for index, plane in enumerate(planes):
            start = plane.data_ptr() - memory.flat.data_ptr()
            assert start == memory.map.offset(group, index) >= ends
            assert start % 256 == 0
            ends = start + plane.nbytes
            row = memory.map.row_offset(group, index, 1, 5)
            assert plane[1, 5].data_ptr() - memory.flat.data_ptr() == row
    assert ends <= memory.flat.numel() == PoolMap(layout=memory.layout, blocks=3).nbytes


def test_memory_comes_from_where_it_is_said() -> None:
    asked: list[int] = []

    def allocate(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    memory = KvMemory(layout(8), 3, "cpu", allocate)
    assert asked == [memory.flat.numel()]
