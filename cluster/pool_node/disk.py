"""The disk thread of a pool node: copies between host memory and disk slots, reads first."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

import xxhash

from kvpool.core.node.events import (
    BlockLoad,
    ReadSlots,
    SlotOutcome,
    SlotsRead,
    SlotsWritten,
    Spill,
    WriteSlots,
)
from kvpool.core.node.tier_blocks import PoolPlace
from kvpool.disk.files import DiskFiles
from kvpool.disk.slots import SlotHeader

log = logging.getLogger(__name__)


class PoolDisk:
    """`memory` is the host tier; each of its slots has `block_bytes`. Owns `files` and closes
    them."""

    def __init__(
        self,
        files: DiskFiles,
        memory: memoryview,
        block_bytes: int,
        *,
        post: Callable[[SlotsWritten | SlotsRead], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._files = files
        self._memory = memory
        self._block_bytes = block_bytes
        self._post = post
        self._crashed = crashed
        self._changed = threading.Condition()
        self._reads: deque[ReadSlots] = deque()
        self._writes: deque[WriteSlots] = deque()
        self._closing = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="kvrelay-disk", daemon=True)
        self._thread.start()

    def put(self, job: WriteSlots | ReadSlots) -> None:
        with self._changed:
            if isinstance(job, ReadSlots):
                self._reads.append(job)
            else:
                self._writes.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Drops the operations that have not begun."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._files.close()

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                if isinstance(job, ReadSlots):
                    self._read(job)
                else:
                    self._write(job)
        except Exception as error:
            self._crashed(error)

    def _next(self) -> WriteSlots | ReadSlots | None:
        with self._changed:
            self._changed.wait_for(lambda: self._reads or self._writes or self._closing)
            if self._closing:
                return None
            return self._reads.popleft() if self._reads else self._writes.popleft()

    def _read(self, job: ReadSlots) -> None:
        self._post(SlotsRead(batch=job.batch, checksums=tuple(map(self._load, job.loads))))

    def _load(self, load: BlockLoad) -> int | None:
        try:
            found = self._files.read(load.slot, load.hash, self._place(load.place))
        except OSError as error:
            log.warning("slot %d can't be read: %s", load.slot, error)
            return None
        if found is None:
            log.warning("slot %d is damaged: its block is dropped", load.slot)
        return found

    def _write(self, job: WriteSlots) -> None:
        outcomes = []
        for spill in job.spills:
            while self._reads and not self._closing:
                self._read(self._reads.popleft())
            outcomes.append(self._spill(spill))
        self._post(SlotsWritten(batch=job.batch, outcomes=tuple(outcomes)))

    def _spill(self, spill: Spill) -> SlotOutcome:
        copy = memoryview(bytes(self._place(spill.place)))  # workers can't reach it
        if xxhash.xxh3_64_intdigest(copy) != spill.checksum:
            return SlotOutcome.DAMAGED
        header = SlotHeader(
            hash=spill.hash,
            parent=spill.parent,
            written=0,
            length=copy.nbytes,
            checksum=spill.checksum,
        )
        try:
            self._files.write(spill.slot, header, copy)
        except OSError as error:
            self._failed(error)
            return SlotOutcome.FAILED
        self._failing = False
        return SlotOutcome.WRITTEN

    def _failed(self, error: OSError) -> None:
        """Logs a failure once, until the disk works again."""
        if not self._failing:
            log.warning("the disk tier takes no more blocks: %s", error)
        self._failing = True

    def _place(self, place: PoolPlace) -> memoryview:
        return self._memory[place * self._block_bytes : (place + 1) * self._block_bytes]
