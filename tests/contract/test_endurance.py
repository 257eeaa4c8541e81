"""The contract of transports over all of them: many writers, many transfers."""

from __future__ import annotations

import os

import psutil
import torch

from kvpool.transport.peer.base import Connection, Read, Region, RegionWrite
from tests.contract.transport_kit import (
    PATIENCE_S,
    MakeSide,
    held,
    no_more_than,
    pair,
    run_all,
    until,
)

_TRANSFERS = 10_000
_GROWTH_BYTES = 8 * 2**20


def test_two_writers_at_once_into_different_regions(make_side: MakeSide) -> None:
    owner = make_side()
    regions = [owner.region(300_001) for _ in range(2)]
    writers = [make_side() for _ in regions]

    def write(number: int) -> None:
        connection = writers[number].endpoint.connect(owner.endpoint.address)
        for value in range(30):
            data = torch.full((300_001,), 100 * number + value, dtype=torch.uint8)
            connection.write(regions[number].name, 0, data)
        connection.notify(bytes([number]))

    run_all([lambda: write(0), lambda: write(1)])
    assert {owner.next(), owner.next()} == {b"\0", b"\1"}
    assert [set(region.memory.tolist()) for region in regions] == [{29}, {129}]


def test_concurrent_streams_do_not_mix(make_side: MakeSide) -> None:
    """Eight threads over two connections write, tell, read back and check, each in its own part."""
    owner, _, first = pair(make_side)
    second = make_side().endpoint.connect(owner.endpoint.address)
    region, size = owner.region(8 * 10_007), 10_007
    wrong: list[int] = []

    def stream(connection: Connection, number: int) -> None:
        for value in range(40):
            source = torch.full((size,), (7 * number + value) % 251, dtype=torch.uint8)
            target = torch.zeros_like(source)
            connection.write(region.name, number * size, source)
            connection.notify(bytes([number, value]))
            connection.read(region.name, number * size, target)
            if not torch.equal(source, target):
                wrong.append(number)

    run_all([lambda n=n: stream((first, second)[n % 2], n) for n in range(8)])  # type: ignore[misc]
    told: dict[int, list[int]] = {number: [] for number in range(8)}
    for _ in range(8 * 40):
        number, value = owner.next()
        told[number].append(value)
    assert not wrong
    assert all(values == list(range(40)) for values in told.values())


def _transfer(connection: Connection, region: Region, data: torch.Tensor, count: int) -> None:
    halves = data.split(data.numel() // 2)
    for number in range(count):
        match number % 4:
            case 0:
                connection.write(region.name, 0, data)
            case 1:
                connection.read(region.name, 0, data)
            case 2:
                connection.write_many([RegionWrite(region.name, 0, half) for half in halves])
            case 3:
                connection.read_many([Read(region.name, 0, half) for half in halves])


def test_ten_thousand_transfers_leave_nothing_behind(make_side: MakeSide) -> None:
    owner, writer, connection = pair(make_side)
    region = owner.region(1 << 12)
    pieces = [writer.region(1 << 12).memory, torch.ones(1 << 12, dtype=torch.uint8)]
    process = psutil.Process(os.getpid())

    def transfer(count: int) -> None:
        for data in pieces:
            _transfer(connection, region, data, count // 2)
        connection.notify(b"done")
        assert owner.next() == b"done"

    transfer(_TRANSFERS // 10)
    before, resident_bytes = held(), process.memory_info().rss
    transfer(_TRANSFERS)
    until(lambda: no_more_than(before))
    assert process.memory_info().rss - resident_bytes < _GROWTH_BYTES
    connection.close()
    owner.lost.get(timeout=PATIENCE_S)
