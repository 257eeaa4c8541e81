"""The disk thread of a pool node: real files, and host places that change under it."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from cluster.pool_node.disk import PoolDisk
from kvpool.core.node.events import (
    BlockLoad,
    ReadSlots,
    SlotOutcome,
    SlotsRead,
    SlotsWritten,
    Spill,
    WriteSlots,
)
from kvpool.core.node.messages import PoolFormat
from kvpool.core.node.tier_blocks import PoolPlace
from kvpool.disk.files import DiskFiles
from tests.unit.naive_tree import hashes_of

SIZE = 4096
FORMAT = PoolFormat(fingerprint="5a" * 16, physical_format="bfloat16/block16", block_bytes=SIZE)
CHAIN = hashes_of((1, 2, 3))


class Disk:
    def __init__(self, folder: Path) -> None:
        self.memory = bytearray(b"".join(bytes([i]) * SIZE for i in range(4)))
        self.files = DiskFiles(folder, 2**20)
        self.files.open(FORMAT)
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.disk = PoolDisk(
            self.files,
            memoryview(self.memory),
            SIZE,
            post=self.events.put,
            crashed=self.events.put,
        )

    def checksum(self, place: int) -> int:
        return xxhash.xxh3_64_intdigest(self.memory[place * SIZE : (place + 1) * SIZE])

    def spill(self, index: int) -> Spill:
        """Block `index` of the chain, from the place and into the slot of that number."""
        place = PoolPlace(index)
        parent = CHAIN[index - 1] if index else None
        checksum = self.checksum(index)
        return Spill(hash=CHAIN[index], parent=parent, place=place, checksum=checksum, slot=place)

    def run(self, job: WriteSlots | ReadSlots) -> object:
        self.disk.put(job)
        return self.events.get(timeout=20)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    disk.disk.close()
    assert disk.events.empty()


def test_a_place_that_has_changed_is_not_written(disk: Disk) -> None:
    spills = tuple(disk.spill(i) for i in range(3))
    disk.memory[SIZE + 9] ^= 1
    outcomes = (SlotOutcome.WRITTEN, SlotOutcome.DAMAGED, SlotOutcome.WRITTEN)
    assert disk.run(WriteSlots(batch=1, spills=spills)) == SlotsWritten(batch=1, outcomes=outcomes)
    sums = disk.checksum(0), disk.checksum(2)
    disk.memory[:] = bytes(len(disk.memory))
    loads = tuple(BlockLoad(hash=s.hash, slot=s.slot, place=s.place) for s in spills)
    read = disk.run(ReadSlots(batch=2, parent=None, loads=loads))
    assert read == SlotsRead(batch=2, checksums=(sums[0], None, sums[1]))
    assert (disk.checksum(0), disk.checksum(2)) == sums


def test_a_disk_that_fails_is_said_once_and_loses_nothing_else(
    disk: Disk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    spills = tuple(disk.spill(i) for i in range(2))
    with monkeypatch.context() as full:
        full.setattr(disk.files, "_at", _no_space)
        failed = SlotsWritten(batch=1, outcomes=(SlotOutcome.FAILED,) * 2)
        assert disk.run(WriteSlots(batch=1, spills=spills)) == failed
    assert caplog.text.count("the disk tier takes no more blocks: full") == 1
    written = SlotsWritten(batch=2, outcomes=(SlotOutcome.WRITTEN,) * 2)
    assert disk.run(WriteSlots(batch=2, spills=spills)) == written


def _no_space(slot: PoolPlace, *, create: bool = False) -> tuple[int, int]:
    raise OSError("full")
