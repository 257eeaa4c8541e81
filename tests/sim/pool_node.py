"""A pool node of a simulated host: the real core over pretended memory and disk.

A node is one process life; the disk outlives it. Its disk thread does reads first, and a block that
was being written when the node died is torn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvpool.core.blocks.eviction import open_policy
from kvpool.core.layout.hashes import BlockHash
from kvpool.core.node.events import (
    BlockLoad,
    PoolCommand,
    PoolEvent,
    ReadSlots,
    SlotOutcome,
    SlotsRead,
    SlotsWritten,
    Spill,
    WriteSlots,
)
from kvpool.core.node.host_tier import HostTier
from kvpool.core.node.restored import RestoredBlock, restore
from kvpool.core.node.tier_blocks import PoolPlace, TierBlocks
from kvrelay.types import Incarnation
from tests.sim.contents import GARBAGE, Content, checksum, stands_for
from tests.sim.simulation import LEASE_S, Simulation


@dataclass(slots=True)
class Slot:
    hash: BlockHash
    parent: BlockHash | None
    written: int
    checksum: int
    content: Content = GARBAGE


@dataclass(slots=True, kw_only=True)
class Host:
    """`slots` are on its disk; `node` is the life that there is now."""

    name: str
    places: int
    disk_slots: int
    policy: str = "lru"
    block_size: int = 4
    slots: dict[PoolPlace, Slot] = field(default_factory=dict)
    written: int = 0
    lives: int = 0
    node: PoolNode | None = None


class PoolNode:
    def __init__(
        self, simulation: Simulation, host: Host, obey: Callable[[PoolCommand], None]
    ) -> None:
        """`obey` gets all but what is the disk's."""
        self._simulation = simulation
        self._obey = obey
        self.host = host
        self.incarnation = Incarnation(f"{host.name}-pool.{host.lives}")
        self.region = f"region {self.incarnation}"
        self.places: list[Content] = [GARBAGE] * host.places
        self.worker_of: dict[int, Incarnation] = {}  # link |-> who
        self.link_of: dict[Incarnation, int] = {}
        self.disk_reads = self.disk_writes = 0
        self._reads: list[ReadSlots] = []
        self._writing: tuple[WriteSlots, list[SlotOutcome]] | None = None
        self._disk_is_busy = False
        disk = TierBlocks(host.disk_slots, open_policy(host.policy))
        restore(
            disk,
            (
                RestoredBlock(hash=slot.hash, parent=slot.parent, place=place, written=slot.written)
                for place, slot in host.slots.items()
            ),
        )
        memory = TierBlocks(host.places, open_policy(host.policy))
        self.core = HostTier(memory, disk, lease_ttl_s=LEASE_S)

    def decide(self, event: PoolEvent) -> None:
        for command in self.core.handle(event, self._simulation.now_s):
            match command:
                case ReadSlots():
                    self._reads.append(command)
                case WriteSlots():
                    assert self._writing is None
                    self._writing = (command, [])
                case _:
                    self._obey(command)
        self._work()

    # --- the disk's thread ----------------------------------------------------------------------

    def _work(self) -> None:
        if self._disk_is_busy:
            return
        if self._reads:
            read = self._reads.pop(0)
            self._begin(lambda: self._read(read))
        elif self._writing is not None:
            write, outcomes = self._writing
            spill = write.spills[len(outcomes)]
            self._begin(lambda: self._spill(write, spill, outcomes))

    def _begin(self, action: Callable[[], None]) -> None:
        """Is over after a while."""

        def end() -> None:
            self._disk_is_busy = False
            action()
            self._work()

        self._disk_is_busy = True
        name, slow = self.incarnation, self._simulation.random.choice([0.01, 0.01, 0.3])
        self._simulation.by(name, f"disk {name}", end, slow)

    def _read(self, job: ReadSlots) -> None:
        found = tuple(map(self._load, job.loads))
        self.decide(SlotsRead(batch=job.batch, checksums=found))

    def _load(self, load: BlockLoad) -> int | None:
        self.disk_reads += 1
        slot = self.host.slots.get(load.slot)
        if slot is None:
            return None
        self.places[load.place] = slot.content
        sound = slot.hash == load.hash and slot.checksum == checksum(slot.content)
        return slot.checksum if sound else None

    def _spill(self, write: WriteSlots, spill: Spill, outcomes: list[SlotOutcome]) -> None:
        """Copies it, checks the copy, begins to write it; is done some time later."""
        content = self.places[spill.place]
        if checksum(content) != spill.checksum:
            self._spilled(write, outcomes, SlotOutcome.DAMAGED)
        elif self._simulation.random.random() < 0.03:
            self._spilled(write, outcomes, SlotOutcome.FAILED)
        else:
            self.host.written += 1
            slot = Slot(spill.hash, spill.parent, self.host.written, spill.checksum)
            self.host.slots[spill.slot] = slot
            self._begin(lambda: self._wrote(slot, content, write, outcomes))

    def _wrote(
        self, slot: Slot, content: Content, write: WriteSlots, outcomes: list[SlotOutcome]
    ) -> None:
        slot.content = content
        self.disk_writes += 1
        self._spilled(write, outcomes, SlotOutcome.WRITTEN)

    def _spilled(
        self, write: WriteSlots, outcomes: list[SlotOutcome], outcome: SlotOutcome
    ) -> None:
        outcomes.append(outcome)
        if len(outcomes) == len(write.spills):
            self._writing = None
            self.decide(SlotsWritten(batch=write.batch, outcomes=tuple(outcomes)))

    def validate(self) -> None:
        """No block is where its checksum is right and its content isn't."""
        self.core.validate()
        blocks = self.core._host
        for block_hash in blocks:
            at = blocks.find(block_hash)
            assert at is not None
            place = blocks.place(at)
            content = self.places[place]
            if blocks.serves(block_hash) and checksum(content) == self.core.checksums[place]:
                assert stands_for(content, block_hash, self.host.block_size), "a wrong block"
        for slot in self.host.slots.values():
            if checksum(slot.content) == slot.checksum:
                assert stands_for(slot.content, slot.hash, self.host.block_size), "on disk"
