"""Segment files: what comes back after a restart, and what must not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash

from kvpool.core.node.messages import PoolFormat
from kvpool.core.node.restored import RestoredBlock
from kvpool.core.node.tier_blocks import PoolPlace
from kvpool.disk.files import DiskFiles
from kvpool.disk.slots import FILE_HEADER_BYTES, SLOT_HEADER_BYTES, SlotHeader
from kvrelay.errors import ConfigError
from tests.unit.naive_tree import hashes_of

SIZE = 1000
FORMAT = PoolFormat(fingerprint="5a" * 16, physical_format="bfloat16/block16", block_bytes=SIZE)
SLOT = SLOT_HEADER_BYTES + SIZE
A, B, C = hashes_of((1, 2, 3))
ROOM = FILE_HEADER_BYTES + 8 * SLOT


@contextmanager
def opened(folder: Path, size: int = ROOM, format_: PoolFormat = FORMAT) -> Iterator[DiskFiles]:
    files = DiskFiles(folder, size)
    try:
        files.found_format()
        files.open(format_)
        yield files
    finally:
        files.close()


def payload(byte: int) -> memoryview:
    return memoryview(bytes([byte]) * SIZE)


def write(files: DiskFiles, slot: int, name: bytes, parent: bytes | None, byte: int) -> None:
    data = payload(byte)
    header = SlotHeader(
        hash=name,  # type: ignore[arg-type]
        parent=parent,  # type: ignore[arg-type]
        written=0,
        length=SIZE,
        checksum=xxhash.xxh3_64_intdigest(data),
    )
    files.write(PoolPlace(slot), header, data)


def read(files: DiskFiles, slot: int, name: bytes) -> bytes | None:
    target = bytearray(SIZE)
    found = files.read(PoolPlace(slot), name, memoryview(target))  # type: ignore[arg-type]
    assert found in (None, xxhash.xxh3_64_intdigest(target))
    return None if found is None else bytes(target)


def test_written_slots_come_back_in_order(tmp_path: Path) -> None:
    with opened(tmp_path / "new" / "folder") as files:
        write(files, 5, A, None, 1)
        write(files, 0, B, A, 2)
        assert read(files, 0, B) == bytes(payload(2))
    with opened(tmp_path / "new" / "folder") as files:
        found = list(files.scan())
        assert found == [
            RestoredBlock(hash=B, parent=A, place=PoolPlace(0), written=2),
            RestoredBlock(hash=A, parent=None, place=PoolPlace(5), written=1),
        ]
        assert read(files, 5, A) == bytes(payload(1))
        write(files, 5, C, B, 3)
        assert read(files, 5, A) is None, "the slot is another block's now"
    with opened(tmp_path / "new" / "folder") as files:
        assert {block.hash: block.written for block in files.scan()} == {B: 2, C: 3}


@pytest.mark.parametrize("offset", [0, 40, 300, SLOT_HEADER_BYTES - 1])
def test_a_damaged_slot_header_is_left_out(
    tmp_path: Path, offset: int, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as files:
        write(files, 0, A, None, 1)
        write(files, 1, B, A, 2)
    flip(tmp_path, FILE_HEADER_BYTES + offset)
    with opened(tmp_path) as files:
        assert [block.hash for block in files.scan()] == [B]
        assert read(files, 0, A) is None
    assert "1 damaged slots dropped" in caplog.text


@pytest.mark.parametrize("offset", [0, SIZE - 1])
def test_a_damaged_block_is_not_read(tmp_path: Path, offset: int) -> None:
    with opened(tmp_path) as files:
        write(files, 0, A, None, 1)
    flip(tmp_path, FILE_HEADER_BYTES + SLOT_HEADER_BYTES + offset)
    with opened(tmp_path) as files:
        assert len(list(files.scan())) == 1
        assert read(files, 0, A) is None


def test_a_file_that_was_cut_short_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    with opened(tmp_path) as files:
        write(files, 0, A, None, 1)
        write(files, 1, B, A, 2)
    os.truncate(segment(tmp_path), FILE_HEADER_BYTES + 2 * SLOT - 1)
    with opened(tmp_path) as files:
        assert len(list(files.scan())) == 2
        assert read(files, 0, A) == bytes(payload(1))
        assert read(files, 1, B) is None


def test_foreign_files_are_deleted_and_others_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as files:
        write(files, 0, A, None, 1)
    flip(tmp_path, 20)
    (tmp_path / "notes.txt").write_text("mine")
    files = DiskFiles(tmp_path, ROOM)
    assert files.found_format() is None
    files.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kvrelay.lock", "notes.txt"]
    assert "damaged or from another version: deleted" in caplog.text


def test_the_size_is_a_bound_also_after_it_shrinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment_bytes = FILE_HEADER_BYTES + 3 * SLOT
    monkeypatch.setattr("kvpool.disk.files._SEGMENT_BYTES", segment_bytes)
    with opened(tmp_path, 3 * segment_bytes) as files:
        assert files.open(FORMAT) == 9
        for slot, name in ((0, A), (4, B), (8, C)):
            write(files, slot, name, None, slot)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3 * segment_bytes
    with opened(tmp_path, segment_bytes + FILE_HEADER_BYTES + SLOT + 5) as files:
        assert files.open(FORMAT) == 4
        assert [block.hash for block in files.scan()] == [A]
        assert len(list(tmp_path.glob("*.segment"))) == 2


def test_a_size_that_holds_no_block_is_refused(tmp_path: Path) -> None:
    message = "pool.disk_size: 5000 bytes, but one block takes 5608"
    with pytest.raises(ConfigError, match=message), opened(tmp_path, 5000):
        pass


def test_a_folder_has_one_user(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(ConfigError, match="another pool node uses"):
        DiskFiles(tmp_path, ROOM)
    with opened(tmp_path):
        pass


def test_clear_leaves_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as files:
        write(files, 0, A, None, 1)
        files.clear()
        assert not list(tmp_path.glob("*.segment"))
        assert files.found_format() is None
        with pytest.raises(FileNotFoundError):
            read(files, 0, A)
        write(files, 0, B, None, 2)
        assert files.found_format() == FORMAT


def segment(folder: Path) -> Path:
    (path,) = folder.glob("*.segment")
    return path


def flip(folder: Path, offset: int) -> None:
    with segment(folder).open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
