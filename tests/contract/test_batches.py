"""The contract of transports over all of them: batches, and adopted memory."""

from __future__ import annotations

import pytest
import torch

from kvpool.transport.mapped import memfd
from kvpool.transport.peer.base import Read, RegionName, RegionWrite
from kvrelay.errors import ConfigError, PeerError
from tests.contract.transport_kit import MakeSide, eventually_raises, pair, shareable

SIZES = (1, 0, 3, 4096, 17, 100_003, 2)


def _numbered(nbytes: int, first: int = 0) -> torch.Tensor:
    return (torch.arange(first, first + nbytes) % 251).to(torch.uint8)


def test_a_batch_writes_each_piece_to_its_place(make_side: MakeSide) -> None:
    owner, _, connection = pair(make_side)
    regions = [owner.region(sum(SIZES) + 100) for _ in range(2)]
    writes, expected = [], []
    for number, region in enumerate(regions):
        region.memory.fill_(255)
        expected.append(region.memory.clone().cpu())
        offset = 100
        for size in reversed(SIZES):
            source = _numbered(size, number)
            writes.append(RegionWrite(region.name, offset, source))
            expected[number][offset : offset + size] = source
            offset += size
    connection.write_many(writes)
    assert all(torch.equal(r.memory.cpu(), e) for r, e in zip(regions, expected, strict=True))


@pytest.mark.parametrize("registered", [False, True])
def test_thousands_of_small_pieces(make_side: MakeSide, registered: bool) -> None:
    """Gathered from scattered places and back, here from registered memory or any other."""
    count, size = 5000, 1031
    owner, writer, connection = pair(make_side)
    region = owner.region(count * size)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(7)).tolist()
    source, target = (
        writer.region(count * size).memory if registered else torch.zeros(count * size).byte()
        for _ in range(2)
    )
    source.copy_(_numbered(count * size))
    pieces = list(zip(order, source.split(size), strict=True))
    connection.write_many([RegionWrite(region.name, at * size, piece) for at, piece in pieces])
    assert torch.equal(region.memory.cpu().view(count, size)[order], source.cpu().view(count, size))
    pieces = list(zip(order, target.split(size), strict=True))
    connection.read_many([Read(region.name, at * size, piece) for at, piece in pieces])
    assert torch.equal(target, source)


def test_a_batch_takes_any_dtype(make_side: MakeSide) -> None:
    owner, _, connection = pair(make_side)
    region, halves = owner.region(1000), torch.randn(3, 5).half()
    connection.write_many(
        [RegionWrite(region.name, 0, halves), RegionWrite(region.name, 30, halves[1])]
    )
    targets = torch.zeros_like(halves), torch.zeros(5).half()
    connection.read_many([Read(region.name, o, t) for o, t in zip((0, 30), targets, strict=True)])
    assert torch.equal(targets[0], halves)
    assert torch.equal(targets[1], halves[1])


def test_no_pieces_are_a_batch_too(make_side: MakeSide) -> None:
    _, _, connection = pair(make_side)
    connection.write_many([])
    connection.read_many([])


def test_a_batch_with_an_unknown_region_raises(make_side: MakeSide) -> None:
    owner, _, connection = pair(make_side)
    region, data = owner.region(10), torch.ones(10, dtype=torch.uint8)
    names = (region.name, RegionName("nonsense"))
    with pytest.raises(PeerError, match="nonsense"):
        connection.write_many([RegionWrite(name, 0, data) for name in names])
    with pytest.raises(PeerError, match="nonsense"):
        connection.read_many([Read(name, 0, data) for name in names])


def test_a_batch_beyond_the_region_is_a_bug(make_side: MakeSide) -> None:
    owner, _, connection = pair(make_side)
    region, data = owner.region(10), torch.zeros(8, dtype=torch.uint8)
    for offset in (-1, 3):
        with pytest.raises(AssertionError):
            connection.write_many([RegionWrite(region.name, offset, data)])
        with pytest.raises(AssertionError):
            connection.read_many([Read(region.name, offset, data)])


def test_memory_from_elsewhere_is_written_and_read_in_place(
    make_side: MakeSide, scheme: str
) -> None:
    """A whole paged KV pool, lent in parts that are not aligned to pages."""
    owner, _, connection = pair(make_side)
    memory = shareable(scheme, 3 * 5000 + 1)
    regions = [owner.endpoint.adopt(part) for part in memory.split(5000)]
    assert [region.memory.numel() for region in regions] == [5000, 5000, 5000, 1]
    memory.copy_(_numbered(15_001))
    got = [torch.zeros(region.memory.numel(), dtype=torch.uint8) for region in regions]
    connection.read_many([Read(r.name, 0, t) for r, t in zip(regions, got, strict=True)])
    assert torch.equal(torch.cat(got), memory.cpu())
    connection.write(regions[1].name, 4999, torch.tensor([9], dtype=torch.uint8))
    assert (int(memory[9999]), int(memory[10_000])) == (9, 10_000 % 251)
    assert {region.memory.data_ptr() - memory.data_ptr() for region in regions} == {
        0, 5000, 10_000, 15_000,
    }  # fmt: skip


def test_adopted_memory_outlives_its_region_and_can_be_adopted_again(
    make_side: MakeSide, scheme: str
) -> None:
    owner, _, connection = pair(make_side)
    memory = shareable(scheme, 5000)
    first, neighbour = owner.endpoint.adopt(memory[:4000]), owner.endpoint.adopt(memory[4000:])
    data = torch.ones(10, dtype=torch.uint8)
    connection.write(first.name, 0, data)
    owner.endpoint.deregister(first)
    eventually_raises(lambda: connection.write(first.name, 20, data))
    connection.write(neighbour.name, 0, data)
    memory[100:].fill_(3)
    again = owner.endpoint.adopt(memory[:4000])
    target = torch.zeros(5000, dtype=torch.uint8)
    connection.read_many(
        [Read(again.name, 0, target[:4000]), Read(neighbour.name, 0, target[4000:])]
    )
    assert torch.equal(target, memory.cpu())


def test_memory_that_was_not_made_to_be_shared(make_side: MakeSide, scheme: str) -> None:
    side, memory = make_side(), torch.zeros(100, dtype=torch.uint8)
    reasons = {
        "shm": r"only memory of kvpool\.transport\.mapped\.memfd\.allocate",
        "cuda_ipc": "only, not cpu",
    }
    if scheme not in reasons:
        assert side.endpoint.adopt(memory).memory.data_ptr() == memory.data_ptr()
        return
    for other in (memory, memfd.allocate(10).clone()):
        with pytest.raises(ConfigError, match=reasons[scheme]):
            side.endpoint.adopt(other)
