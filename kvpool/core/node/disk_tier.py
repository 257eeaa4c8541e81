"""Decides which host blocks go to disk and come back. Pure; runs in the pool node.

Write-behind: blocks new in host memory are queued, and written in batches, one at a time. Nothing
waits for it: a block that leaves host memory before its turn isn't written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvpool.core.layout.hashes import BlockHash
from kvpool.core.node.events import BlockLoad, ReadSlots, SlotOutcome, Spill, WriteSlots
from kvpool.core.node.tier_blocks import PoolPlace, ReservedRoom, TierBlocks

_BATCH_BLOCKS = 32


class DiskTier:
    """`blocks` are the disk slots; empty without a disk tier."""

    def __init__(self, blocks: TierBlocks) -> None:
        self.blocks = blocks
        self._queue: dict[BlockHash, None] = {}  # parents before their children
        self._writing: WriteSlots | None = None
        self._reading: dict[int, ReadSlots] = {}
        self._coming: dict[BlockHash, int] = {}  # block |-> the read that brings it
        self._batches = 0

    @property
    def waiting(self) -> int:
        """Blocks that aren't written yet."""
        return len(self._queue) + self.writing

    @property
    def writing(self) -> int:
        return len(self._writing.spills) if self._writing else 0

    # --- write-behind ---------------------------------------------------------------------------

    def want(self, hashes: Iterable[BlockHash], host: TierBlocks) -> None:
        """Queues these host blocks, and their ancestors that are not on disk."""
        if not self.blocks.count:
            return
        for block_hash in hashes:
            self._queue.update(dict.fromkeys(self._missing(block_hash, host)))

    def _missing(self, block_hash: BlockHash, host: TierBlocks) -> list[BlockHash]:
        missing: list[BlockHash] = []
        above: BlockHash | None = block_hash
        while above is not None and above not in self._queue and not self.blocks.serves(above):
            missing.append(above)
            above = host.parent(above)
        missing.reverse()
        return missing

    def next_write(
        self, host: TierBlocks, checksums: Mapping[BlockHash, int]
    ) -> tuple[WriteSlots, ReservedRoom] | None:
        """None while a batch is being written or no block waits."""
        if self._writing is not None:
            return None
        picked = self._pick(host)
        if not picked:
            return None
        parents = [host.parent(block_hash) for block_hash in picked]
        room = self.blocks.reserve(len(picked), below=parents)
        spills = tuple(
            Spill(hash=h, parent=p, place=host.place(h), checksum=checksums[h], slot=slot)
            for h, p, slot in zip(picked, parents, room.places, strict=False)
        )
        if spills:
            self._writing = WriteSlots(batch=self._next_batch(), spills=spills)
            return self._writing, room
        return None

    def _pick(self, host: TierBlocks) -> list[BlockHash]:
        picked: dict[BlockHash, None] = {}
        while self._queue and len(picked) < _BATCH_BLOCKS:
            block_hash = next(iter(self._queue))
            del self._queue[block_hash]
            if host.serves(block_hash) and not self.blocks.serves(block_hash):
                parent = host.parent(block_hash)
                if parent is None or parent in picked or parent in self.blocks:
                    picked[block_hash] = None
        return list(picked)

    def written(
        self, batch: int, outcomes: Sequence[SlotOutcome]
    ) -> tuple[list[BlockHash], list[Spill]]:
        """(blocks that are on disk now, blocks whose host place did not hold their bytes)"""
        writing, self._writing = self._writing, None
        assert writing is not None and writing.batch == batch, batch
        new: list[BlockHash] = []
        for run in _chains(writing.spills, outcomes):
            new += self.blocks.adopt(run[0].parent, [(spill.hash, spill.slot) for spill in run])
        pairs = list(zip(writing.spills, outcomes, strict=True))
        self.blocks.give_back(s.slot for s, o in pairs if o is not SlotOutcome.WRITTEN)
        return new, [spill for spill, outcome in pairs if outcome is SlotOutcome.DAMAGED]

    # --- read back ------------------------------------------------------------------------------

    def absent(self, hashes: Sequence[BlockHash]) -> tuple[set[int], Sequence[BlockHash]]:
        """For blocks that aren't in host memory: the reads that bring some of them, and the end of
        the chain that no read brings."""
        reads = [self._coming.get(block_hash) for block_hash in hashes]
        first = next((i for i, read in enumerate(reads) if read is None), len(reads))
        rest = reads[first:]
        waits = {read for read in reads if read is not None}
        return waits, () if any(read is not None for read in rest) else hashes[first:]

    def is_coming(self, block_hash: BlockHash) -> bool:
        return block_hash in self._coming

    def read(self, hashes: Sequence[BlockHash], places: Sequence[PoolPlace]) -> ReadSlots:
        """Reads the first blocks of the chain `hashes`, as many as there are places."""
        loads = tuple(
            BlockLoad(hash=block_hash, slot=self.blocks.place(block_hash), place=place)
            for block_hash, place in zip(hashes, places, strict=False)
        )
        parent = self.blocks.parent(hashes[0])
        reading = ReadSlots(batch=self._next_batch(), parent=parent, loads=loads)
        self._reading[reading.batch] = reading
        self._coming.update((load.hash, reading.batch) for load in loads)
        return reading

    def arrived(self, batch: int) -> ReadSlots:
        reading = self._reading.pop(batch)
        for load in reading.loads:
            del self._coming[load.hash]
        return reading

    def host_places(self) -> list[PoolPlace]:
        """Places that are being read into."""
        return [load.place for reading in self._reading.values() for load in reading.loads]

    def _next_batch(self) -> int:
        self._batches += 1
        return self._batches

    def validate(self) -> None:
        self.blocks.validate()
        spills = self._writing.spills if self._writing else ()
        assert self.blocks.reserved == {spill.slot for spill in spills}
        coming = {load.hash: r.batch for r in self._reading.values() for load in r.loads}
        assert coming == self._coming


def _chains(spills: Sequence[Spill], outcomes: Sequence[SlotOutcome]) -> list[list[Spill]]:
    """The written chains, cut where a block is not the child of the one before it."""
    chains: list[list[Spill]] = []
    for spill, outcome in zip(spills, outcomes, strict=True):
        if outcome is not SlotOutcome.WRITTEN:
            continue
        if chains and chains[-1][-1].hash == spill.parent:
            chains[-1].append(spill)
        else:
            chains.append([spill])
    return chains
