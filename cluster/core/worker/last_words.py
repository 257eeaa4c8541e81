"""What a worker leaves behind when it dies: the step in flight, and why it ended. Pure.

A page of shared memory holds it, and outlives the process. The step is written into the two slots
of the page in turn, each with a checksum. If the worker dies while it writes one slot, the other
one is whole. The process that reads the page imports nothing but this module.

    page   magic, then the end (length, checksum, text), then two slots
    slot   sequence number, length, checksum, entries
    entry  attempt, choice, length of the request id, request id
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from struct import Struct
from typing import NamedTuple
from zlib import crc32

SLOT_BYTES = 128 * 1024
"""Room for 480 of the longest request ids, and for 2,000 usual ones. Only what is written takes
memory."""
END_BYTES = 1024
PAGE_BYTES = END_BYTES + 2 * SLOT_BYTES
_END = Struct("<HI")
_SLOT = Struct("<QII?")
_ENTRY = Struct("<IHH")
_MOST_ID_BYTES = 1024


class WorkerEnd(StrEnum):
    """How a worker's process ended."""

    LIVES = "lives"
    CLOSED = "closed"  # it was asked to
    KILLED = "killed"  # without a word: SIGKILL, or the kernel lacked memory
    CRASHED = "crashed"  # an uncaught exception
    HUNG_STEP = "hung step"
    FATAL_SIGNAL = "fatal signal"

    @property
    def blame(self) -> str:
        """Of `router.core.faults.poison`: whom it speaks against."""
        if self is WorkerEnd.KILLED:
            return "shared"
        return "none" if self in (WorkerEnd.LIVES, WorkerEnd.CLOSED) else "step"


class StepEntry(NamedTuple):
    """One sequence in a step."""

    request_id: str
    attempt: int
    choice: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStep:
    """What was in the steps in flight. Not `complete`: there was not enough room for all."""

    entries: tuple[StepEntry, ...] = ()
    complete: bool = True


@dataclass(slots=True)
class Page:
    """The worker writes it, and whoever outlives the worker reads it."""

    buffer: memoryview
    _written: int = 0

    def __post_init__(self) -> None:
        assert len(self.buffer) >= PAGE_BYTES, len(self.buffer)

    # --- the worker -----------------------------------------------------------------------------

    def write_step(self, entries: Iterable[bytes]) -> None:
        """What `packed` makes of them, in the slot that was not written last."""
        data, complete = _fitting([*entries])
        start = self._start(self._written)
        self._written += 1
        header = _SLOT.pack(self._written, len(data), _sum(self._written, data), complete)
        body = start + _SLOT.size
        self.buffer[body : body + len(data)] = data
        self.buffer[start:body] = header

    def write_end(self, end: WorkerEnd, why: str = "") -> None:
        """The first one counts."""
        if self.read_end()[0] is not WorkerEnd.LIVES:
            return
        data = f"{end}\n{why}".encode("utf-8", "replace")[: END_BYTES - _END.size]
        self.buffer[_END.size : _END.size + len(data)] = data
        self.buffer[: _END.size] = _END.pack(len(data), crc32(data))

    # --- who outlives it ------------------------------------------------------------------------

    def read_end(self) -> tuple[WorkerEnd, str]:
        """How it ended, and why, in words."""
        length, checksum = _END.unpack_from(self.buffer)
        data = bytes(self.buffer[_END.size : _END.size + length])
        if not length or crc32(data) != checksum:
            return WorkerEnd.LIVES, ""
        end, _, why = data.decode("utf-8", "replace").partition("\n")
        return WorkerEnd(end), why

    def read_step(self) -> LastStep:
        """The latest that was written whole."""
        found = [slot for slot in (self._read(0), self._read(1)) if slot is not None]
        if not found:
            return LastStep()
        _, data, complete = max(found, key=lambda slot: slot[0])
        return LastStep(entries=tuple(_unpacked(data)), complete=complete)

    def _read(self, slot: int) -> tuple[int, bytes, bool] | None:
        start = self._start(slot)
        number, length, checksum, complete = _SLOT.unpack_from(self.buffer, start)
        if not number or length > SLOT_BYTES - _SLOT.size:
            return None
        body = start + _SLOT.size
        data = bytes(self.buffer[body : body + length])
        return (number, data, complete) if _sum(number, data) == checksum else None

    @staticmethod
    def _start(number: int) -> int:
        return END_BYTES + number % 2 * SLOT_BYTES


def _sum(number: int, data: bytes) -> int:
    """Of another number than that of its header a slot is half written."""
    return crc32(data, number & 0xFFFFFFFF)


def packed(entry: StepEntry) -> bytes:
    name = entry.request_id.encode("utf-8", "replace")[:_MOST_ID_BYTES]
    return _ENTRY.pack(entry.attempt & 0xFFFFFFFF, entry.choice & 0xFFFF, len(name)) + name


def _fitting(entries: list[bytes]) -> tuple[bytes, bool]:
    """As many as there is room for, and whether these are all."""
    data, room = b"".join(entries), SLOT_BYTES - _SLOT.size
    if len(data) <= room:
        return data, True
    sizes = accumulate(map(len, entries))
    return b"".join(entries[: sum(size <= room for size in sizes)]), False


def _unpacked(data: bytes) -> Iterator[StepEntry]:
    at = 0
    while at < len(data):
        attempt, choice, length = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        yield StepEntry(data[at : at + length].decode("utf-8", "replace"), attempt, choice)
        at += length
