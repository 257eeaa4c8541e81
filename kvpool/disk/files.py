"""The disk tier's files: few large segments of fixed-size slots. Runs in the pool node.

A segment is sparse until its slots are written. Nothing is flushed to disk: blocks that a crash of
the machine damages fail their checksum when they are read, and are dropped.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import xxhash

from kvpool.core.layout.hashes import BlockHash
from kvpool.core.node.messages import PoolFormat
from kvpool.core.node.restored import RestoredBlock
from kvpool.core.node.tier_blocks import PoolPlace
from kvpool.disk.slots import (
    FILE_HEADER_BYTES,
    SLOT_HEADER_BYTES,
    SlotHeader,
    pack_file_header,
    unpack_file_header,
)
from kvrelay.errors import ConfigError

log = logging.getLogger(__name__)

_SEGMENT_BYTES = 2**30
_PATTERN = "kvrelay-*.segment"


class DiskFiles:
    """The segments in one folder, which no other process uses at the same time."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Creates the folder. Raises ConfigError when it can't be used."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._segments: dict[int, int] = {}  # number |-> descriptor
        self._written = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "kvrelay.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"pool.disk: {folder}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"pool.disk: another pool node uses {folder}") from error

    def found_format(self) -> PoolFormat | None:
        """The format of the blocks in the segments; None without segments. Files that are no
        segments of this version are deleted."""
        found: PoolFormat | None = None
        for path in sorted(self._folder.glob(_PATTERN)):
            format_ = _format_of(path)
            if format_ is None or (found is not None and format_ != found):
                log.warning("%s is damaged or from another version: deleted", path)
                path.unlink()
            found = found or format_
        return found

    def open(self, format_: PoolFormat) -> int:
        """From now on the slots hold blocks of this format. Returns their number.

        Raises ConfigError when not one fits.
        """
        self.format = format_
        self._slot_bytes = SLOT_HEADER_BYTES + format_.block_bytes
        self._per_segment = max(1, (_SEGMENT_BYTES - FILE_HEADER_BYTES) // self._slot_bytes)
        whole, rest = divmod(self._max_bytes, self._segment_bytes(self._per_segment))
        last = max(0, rest - FILE_HEADER_BYTES) // self._slot_bytes
        self._slots = whole * self._per_segment + last
        if not self._slots:
            raise ConfigError(
                f"pool.disk_size: {self._max_bytes} bytes, but one block takes "
                f"{self._segment_bytes(1)} on disk"
            )
        return self._slots

    def scan(self) -> Iterator[RestoredBlock]:
        """The blocks in the slots, by their headers only."""
        for path in sorted(self._folder.glob(_PATTERN)):
            number = _number_of(path)
            if number is None or number * self._per_segment >= self._slots:
                log.info("%s is beyond the size of the disk tier: deleted", path)
                path.unlink()
                continue
            self._segments[number] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            yield from self._scan(number)

    def clear(self) -> None:
        """Delete every segment."""
        for descriptor in self._segments.values():
            os.close(descriptor)
        self._segments.clear()
        for path in self._folder.glob(_PATTERN):
            path.unlink()

    def write(self, slot: PoolPlace, header: SlotHeader, payload: memoryview) -> None:
        """Raises OSError. `payload` must not change during the call; `header.written` is set
        here."""
        self._written += 1
        numbered = SlotHeader(
            hash=header.hash,
            parent=header.parent,
            written=self._written,
            length=header.length,
            checksum=header.checksum,
        )
        descriptor, offset = self._at(slot, create=True)
        size = SLOT_HEADER_BYTES + payload.nbytes
        if os.pwritev(descriptor, [numbered.pack(), payload], offset) != size:
            raise OSError(f"a write of {size} bytes was cut short")

    def read(self, slot: PoolPlace, block_hash: BlockHash, target: memoryview) -> int | None:
        """Fills `target` with the block. Returns its checksum, or None when the slot holds another
        block or damaged bytes. Raises OSError."""
        descriptor, offset = self._at(slot)
        head = bytearray(SLOT_HEADER_BYTES)
        if os.preadv(descriptor, [head, target], offset) != SLOT_HEADER_BYTES + target.nbytes:
            return None
        header = SlotHeader.unpack(bytes(head))
        if header is None or header.hash != block_hash or header.length != target.nbytes:
            return None
        found = xxhash.xxh3_64_intdigest(target)
        return found if found == header.checksum else None

    def close(self) -> None:
        for descriptor in self._segments.values():
            os.close(descriptor)
        self._segments.clear()
        os.close(self._lock)

    def _scan(self, number: int) -> Iterator[RestoredBlock]:
        first, damaged = number * self._per_segment, 0
        for slot in range(first, min(first + self._per_segment, self._slots)):
            descriptor, offset = self._at(PoolPlace(slot))
            data = os.pread(descriptor, SLOT_HEADER_BYTES, offset)
            if not data.strip(b"\0"):
                continue  # never written
            header = SlotHeader.unpack(data)
            if header is None or header.length != self.format.block_bytes:
                damaged += 1
                continue
            self._written = max(self._written, header.written)
            yield RestoredBlock(
                hash=header.hash,
                parent=header.parent,
                place=PoolPlace(slot),
                written=header.written,
            )
        if damaged:
            log.warning("%s: %d damaged slots dropped", self._path(number), damaged)

    def _at(self, slot: PoolPlace, *, create: bool = False) -> tuple[int, int]:
        """(descriptor, offset) of the slot. Raises OSError when its segment is not there."""
        number, index = divmod(slot, self._per_segment)
        descriptor = self._segments.get(number)
        if descriptor is None:
            if not create:
                raise FileNotFoundError(self._path(number))
            descriptor = self._segments[number] = self._create(number)
        return descriptor, FILE_HEADER_BYTES + index * self._slot_bytes

    def _create(self, number: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        descriptor = os.open(self._path(number), flags, 0o600)
        try:
            os.pwrite(descriptor, pack_file_header(self.format), 0)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _path(self, number: int) -> Path:
        return self._folder / f"kvrelay-{number:06}.segment"

    def _segment_bytes(self, slots: int) -> int:
        return FILE_HEADER_BYTES + slots * self._slot_bytes


def _format_of(path: Path) -> PoolFormat | None:
    try:
        with path.open("rb") as file:
            return unpack_file_header(file.read(FILE_HEADER_BYTES))
    except OSError as error:
        raise ConfigError(f"pool.disk: {path}: {error.strerror}") from error


def _number_of(path: Path) -> int | None:
    with suppress(ValueError):
        return int(path.stem.removeprefix("kvrelay-"))
    return None
