"""The disk thread of a simulated pool node: one block at a time, reads first. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cluster.sim.machines.clock import Clock
from cluster.sim.machines.host import DiskSlot, SimHost
from kvpool.core.node.events import (
    BlockLoad,
    ReadSlots,
    SlotOutcome,
    SlotsRead,
    SlotsWritten,
    Spill,
    WriteSlots,
)
from kvpool.core.node.restored import RestoredBlock


class SimPoolDisk:
    """`post` receives the results. A block that is being written when the process dies is lost."""

    def __init__(
        self,
        clock: Clock,
        host: SimHost,
        block_bytes: int,
        post: Callable[[SlotsRead | SlotsWritten], None],
    ) -> None:
        self._clock = clock
        self._memory = host.memory
        self._disk = host.disk
        self._block_s = host.speeds.disk_latency + block_bytes / host.speeds.disk_bandwidth
        self._post = post
        self._reads: deque[ReadSlots] = deque()
        self._writes: deque[WriteSlots] = deque()
        self._outcomes: list[SlotOutcome] = []
        self._is_busy = False
        self._is_dead = False

    def put(self, job: ReadSlots | WriteSlots) -> None:
        if isinstance(job, ReadSlots):
            self._reads.append(job)
        else:
            self._writes.append(job)
        self._work()

    def die(self) -> None:
        self._is_dead = True

    def _work(self) -> None:
        if self._is_busy or self._is_dead:
            return
        if self._reads:
            self._is_busy = True
            read = self._reads.popleft()
            self._clock.after(len(read.loads) * self._block_s, self._read, read)
        elif self._writes:
            self._is_busy = True
            self._spill(self._writes[0].spills[len(self._outcomes)])

    # --- reads ----------------------------------------------------------------------------------

    def _read(self, job: ReadSlots) -> None:
        if self._is_dead:
            return
        self._is_busy = False
        self._post(SlotsRead(batch=job.batch, checksums=tuple(map(self._load, job.loads))))
        self._work()

    def _load(self, load: BlockLoad) -> int | None:
        slot = self._disk.slots.get(load.slot)
        if slot is None or slot.block.hash != load.hash:
            return None
        self._memory.load(load.place, slot.checksum)
        return slot.checksum

    # --- writes ---------------------------------------------------------------------------------

    def _spill(self, spill: Spill) -> None:
        """The block is copied at the beginning."""
        if not self._memory.has(spill.place, spill.checksum):
            self._clock.after(0.0, self._spilled, SlotOutcome.DAMAGED)
            return
        self._disk.slots.pop(spill.slot, None)
        self._clock.after(self._block_s, self._written, spill)

    def _written(self, spill: Spill) -> None:
        if self._is_dead:
            return
        self._disk.writes += 1
        block = RestoredBlock(
            hash=spill.hash, parent=spill.parent, place=spill.slot, written=self._disk.writes
        )
        self._disk.slots[spill.slot] = DiskSlot(block, spill.checksum)
        self._spilled(SlotOutcome.WRITTEN)

    def _spilled(self, outcome: SlotOutcome) -> None:
        if self._is_dead:
            return
        self._is_busy = False
        self._outcomes.append(outcome)
        if len(self._outcomes) == len(self._writes[0].spills):
            batch, outcomes = self._writes.popleft().batch, tuple(self._outcomes)
            self._outcomes.clear()
            self._post(SlotsWritten(batch=batch, outcomes=outcomes))
        self._work()
