"""The contract of transports over all of them: regions, and writing to them."""

from __future__ import annotations

import pytest
import torch

from kvpool.transport.peer.base import RegionName
from kvrelay.errors import PeerError
from tests.contract.transport_kit import (
    PATIENCE_S,
    MakeSide,
    Side,
    eventually_raises,
    pair,
    run_all,
    until,
)


def test_a_write_is_visible_before_the_notification(make_side: MakeSide) -> None:
    owner, writer, connection = pair(make_side)
    region = owner.region(100_000)
    accepted = owner.connected.get(timeout=PATIENCE_S)
    for value in range(100):
        connection.write(region.name, 0, torch.full((100_000,), value, dtype=torch.uint8))
        connection.notify(b"filled")
        assert owner.next() == b"filled"
        assert bool((region.memory == value).all())
        accepted.notify(b"free")
        assert writer.next() == b"free"


@pytest.mark.parametrize("count", [0, 1, 7, 4095, 4097, 70_001, 2_500_001])
def test_read_returns_what_was_written_and_touches_nothing_else(
    make_side: MakeSide, count: int
) -> None:
    owner, _, connection = pair(make_side)
    region = owner.region(4 * count + 10)
    region.memory.fill_(255)
    source, target = torch.randn(count), torch.zeros(count)
    connection.write(region.name, 5, source)
    connection.read(region.name, 5, target)
    assert torch.equal(source, target)
    assert torch.equal(region.memory[5 : 5 + 4 * count].cpu(), source.view(torch.uint8))
    assert bool((region.memory[:5] == 255).all())
    assert bool((region.memory[5 + 4 * count :] == 255).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_any_dtype_and_shape(make_side: MakeSide, dtype: torch.dtype) -> None:
    owner, _, connection = pair(make_side)
    region = owner.region(1000)
    source = torch.arange(24).reshape(2, 3, 4).to(dtype)
    target = torch.empty_like(source)
    connection.write(region.name, 3, source)
    connection.read(region.name, 3, target)
    assert torch.equal(source, target)


def test_beyond_the_region_is_a_bug(make_side: MakeSide) -> None:
    owner, _, connection = pair(make_side)
    region = owner.region(10)
    for offset in (-1, 3):
        with pytest.raises(AssertionError):
            connection.write(region.name, offset, torch.zeros(8, dtype=torch.uint8))


def test_a_window_is_the_region_itself(make_side: MakeSide) -> None:
    owner, _, connection = pair(make_side)
    region = owner.region(5000)
    window = connection.window(region.name)
    if window is None:
        pytest.skip("this link cannot map the peer's memory")
    assert (window.dtype, window.shape) == (torch.uint8, (5000,))
    window[1234] = 77
    assert region.memory[1234] == 77
    region.memory[4999] = 78
    assert window[4999] == 78
    again = connection.window(region.name)
    assert again is not None
    assert again.data_ptr() == window.data_ptr(), "mapped once"


def test_two_writers_share_a_region(make_side: MakeSide) -> None:
    owner, first = make_side(), make_side()
    second, region = make_side(), owner.region(2 * 50_000)

    def write(side: Side, half: int) -> None:
        connection = side.endpoint.connect(owner.endpoint.address)
        for value in range(50):
            data = torch.full((50_000,), 100 * half + value, dtype=torch.uint8)
            connection.write(region.name, half * 50_000, data)
        connection.notify(bytes([half]))

    run_all([lambda: write(first, 0), lambda: write(second, 1)])
    assert {owner.next(), owner.next()} == {b"\0", b"\1"}
    assert bool((region.memory[:50_000] == 49).all())
    assert bool((region.memory[50_000:] == 149).all())


def test_regions_of_one_endpoint_are_apart(make_side: MakeSide) -> None:
    owner, _, connection = pair(make_side)
    regions = [owner.region(100 + i) for i in range(8)]
    assert len({region.name for region in regions}) == 8
    for value, region in enumerate(regions):
        connection.write(region.name, 0, torch.full((100,), value, dtype=torch.uint8))
    assert [int(region.memory[99]) for region in regions] == list(range(8))
    assert [region.memory.numel() for region in regions] == [100 + i for i in range(8)]


def test_a_deregistered_region_is_no_target(make_side: MakeSide) -> None:
    owner, _, connection = pair(make_side)
    used, never_used, other = owner.region(10), owner.region(10), owner.region(10)
    data = torch.ones(10, dtype=torch.uint8)
    connection.write(used.name, 0, data)
    owner.endpoint.deregister(used)
    owner.endpoint.deregister(used)
    owner.endpoint.deregister(never_used)
    eventually_raises(lambda: connection.write(used.name, 0, data))
    eventually_raises(lambda: connection.window(used.name))
    eventually_raises(lambda: connection.write(never_used.name, 0, data))
    connection.write(other.name, 0, data)
    assert bool((other.memory == 1).all())


def test_a_region_in_the_place_of_another(make_side: MakeSide) -> None:
    """Whether or not the peer was connected when the old one went."""
    owner, writer, connection = pair(make_side)
    kept = owner.region(5000)
    for value in range(1, 6):
        region = owner.region(5000)
        for target in (kept, region):
            connection.write(target.name, 0, torch.full((5000,), value, dtype=torch.uint8))
            assert bool((target.memory == value).all())
        if value % 2:
            connection.close()
        owner.endpoint.deregister(region)
        name = region.name
        del region, target
        if value % 2:
            connection = writer.endpoint.connect(owner.endpoint.address)
        eventually_raises(lambda: connection.window(name))  # noqa: B023


@pytest.mark.parametrize("closing", ["writer", "owner"])
def test_who_connects_again_knows_nothing_of_before(make_side: MakeSide, closing: str) -> None:
    """Though the writer's thread of the first connection is not through yet."""
    owner, writer, connection = pair(make_side)
    region = owner.region(10)
    connection.write(region.name, 0, torch.ones(10, dtype=torch.uint8))
    writer.reading.clear()
    accepted = owner.connected.get(timeout=PATIENCE_S)
    accepted.notify(b"is held up")
    until(lambda: writer.waiting)
    if closing == "writer":
        connection.close()
        owner.lost.get(timeout=PATIENCE_S)
    else:
        accepted.close()
    owner.endpoint.deregister(region)
    again = writer.endpoint.connect(owner.endpoint.address)
    with pytest.raises(PeerError):
        again.window(region.name)
    writer.reading.set()


def test_a_name_that_was_never_registered(make_side: MakeSide) -> None:
    _, _, connection = pair(make_side)
    with pytest.raises(PeerError, match="nonsense"):
        connection.write(RegionName("nonsense"), 0, torch.zeros(1))
