"""Decides which host blocks go to disk and come back. Pure; runs in the pool node.

Write-behind: blocks new in host memory are queued, and written in batches, one at a time. Nothing
waits for it: a block that leaves host memory before its turn isn't written.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from kvpool.core.blocks.runs import Run, path
from kvpool.core.layout.hashes import BlockHash, BlockHashes
from kvpool.core.node.block_index import BlockAt
from kvpool.core.node.events import BlockLoad, ReadSlots, SlotOutcome, Spill, WriteSlots
from kvpool.core.node.tier_blocks import NewChain, PoolPlace, StrandPart, TierBlocks

_BATCH_BLOCKS = 32


class DiskTier:
    """`blocks` are the disk slots; empty without a disk tier."""

    def __init__(self, blocks: TierBlocks) -> None:
        self.blocks = blocks
        # strand of host memory |-> its blocks to write; parents before their children
        self._queue: OrderedDict[int, range] = OrderedDict()
        self._queued = 0
        self._writing: WriteSlots | None = None
        self._tenants: list[str] = []  # of the blocks that are being written
        self._reading: dict[int, ReadSlots] = {}
        self._coming: dict[BlockHash, int] = {}  # block |-> the read that brings it
        self._batches = 0

    @property
    def waiting(self) -> int:
        """Blocks that aren't written yet."""
        return self._queued + self.writing

    @property
    def writing(self) -> int:
        return len(self._writing.spills) if self._writing else 0

    # --- write-behind ---------------------------------------------------------------------------

    def want(self, new: Iterable[StrandPart], host: TierBlocks) -> None:
        """Queues these host blocks, and their ancestors that are not on disk."""
        if not self.blocks.count:
            return
        for part in new:
            run = host.run_with(BlockAt(part.strand, part.start))
            start = part.start if self.blocks.has_spoiled else self._missing(run, *part[1:])
            if start == part.start:
                self._want_above(run, start)
            self._put(part.strand, start, part.end)

    def _want_above(self, run: Run, depth: int) -> None:
        """Queues the blocks of the chain before this depth of `run` that are not on disk."""
        found: list[StrandPart] = []
        for above in path(run):
            end = min(above.end, depth)
            if above.start < end:
                last = above.at(end - 1)
                if end - 1 in self._queue.get(above.number, ()) or self.blocks.serves(last):
                    break
                found.append(StrandPart(above.number, self._missing(above, above.start, end), end))
        for part in reversed(found):
            self._put(*part)

    def _missing(self, run: Run, start: int, end: int) -> int:
        """The first depth from `start` on that is not on disk; at most `end`. Of spoiled blocks
        only those right before it are written anew."""
        low, high = start, end
        while low < high:
            middle = (low + high) // 2
            if run.at(middle) in self.blocks:
                low = middle + 1
            else:
                high = middle
        while low > start and not self.blocks.serves(run.at(low - 1)):
            low -= 1
        return low

    def _put(self, strand: int, start: int, end: int) -> None:
        before = self._queue.get(strand, range(0))
        if before:
            start, end = min(start, before.start), max(end, before.stop)
        if start < end:
            self._queue[strand] = range(start, end)
            self._queued += end - start - len(before)

    def next_write(self, host: TierBlocks, checksums: Sequence[int]) -> WriteSlots | None:
        """None while a batch is being written or no block waits. `checksums` are by host place."""
        if self._writing is not None:
            return None
        picked = self._pick(host)
        if not picked:
            return None
        slots = self.blocks.reserve(len(picked), below=[host.parent(at) for _, at in picked])
        if not slots:
            return None
        spills = [
            Spill(
                hash=block_hash,
                parent=host.parent(at),
                place=host.place(at),
                checksum=checksums[host.place(at)],
                slot=slot,
            )
            for (block_hash, at), slot in zip(picked, slots, strict=False)
        ]
        self._tenants = [host.tenant(at) for _, at in picked[: len(slots)]]
        self._writing = WriteSlots(batch=self._next_batch(), spills=tuple(spills))
        return self._writing

    def _pick(self, host: TierBlocks) -> list[tuple[BlockHash, BlockAt]]:
        picked: dict[BlockHash, BlockAt] = {}
        while self._queue and len(picked) < _BATCH_BLOCKS:
            strand, depths = next(iter(self._queue.items()))
            left = self._pick_from(strand, depths, host, picked)
            self._queued -= len(depths) - len(left)
            self._queue[strand] = left
            if not left:
                del self._queue[strand]
        return list(picked.items())

    def _pick_from(
        self, strand: int, depths: range, host: TierBlocks, picked: dict[BlockHash, BlockAt]
    ) -> range:
        """Returns what is left. That is nothing where a block's parent is not on disk."""
        for depth in range(depths.start, min(depths.stop, host.end(strand))):
            if len(picked) == _BATCH_BLOCKS:
                return range(depth, depths.stop)
            at = BlockAt(strand, depth)
            block_hash = host.hash_at(at)
            if host.is_spoiled(at) or self.blocks.serves(block_hash):
                continue
            parent = host.parent(at)
            if parent is not None and parent not in picked and parent not in self.blocks:
                break
            picked[block_hash] = at
        return range(0)

    def written(self, batch: int, outcomes: Sequence[SlotOutcome], now_s: float) -> list[Spill]:
        """Returns the blocks whose host place did not hold their bytes."""
        writing, self._writing = self._writing, None
        assert writing is not None and writing.batch == batch, batch
        for chain in self._chains(writing.spills, outcomes):
            self.blocks.adopt(chain, now_s)
        pairs = list(zip(writing.spills, outcomes, strict=True))
        self.blocks.give_back(s.slot for s, o in pairs if o is not SlotOutcome.WRITTEN)
        return [spill for spill, outcome in pairs if outcome is SlotOutcome.DAMAGED]

    def _chains(
        self, spills: Sequence[Spill], outcomes: Sequence[SlotOutcome]
    ) -> Iterator[NewChain]:
        """The written chains, cut where a block is not the child of the one before it."""
        chain: list[tuple[Spill, str]] = []
        for spill, outcome, tenant in zip(spills, outcomes, self._tenants, strict=True):
            if outcome is SlotOutcome.WRITTEN:
                if chain and chain[-1][0].hash != spill.parent:
                    yield _new_chain(chain)
                    chain = []
                chain.append((spill, tenant))
        if chain:
            yield _new_chain(chain)

    # --- read back ------------------------------------------------------------------------------

    def absent(self, hashes: BlockHashes, start: int) -> tuple[set[int], int]:
        """For a chain whose blocks from depth `start` on aren't in host memory: the reads that
        bring some of them, and the depth from which on nobody reads them."""
        if not self._coming:
            return set(), start
        reads = [self._coming.get(block_hash) for block_hash in hashes[start:]]
        first = next((i for i, read in enumerate(reads) if read is None), len(reads))
        if any(read is not None for read in reads[first:]):
            first = len(reads)
        return {read for read in reads if read is not None}, start + first

    def is_coming(self, block_hash: BlockHash) -> bool:
        return block_hash in self._coming

    def read(self, hashes: BlockHashes, start: int, places: Sequence[PoolPlace]) -> ReadSlots:
        """Reads blocks of a chain that is on disk, from depth `start` on, into these places."""
        wanted = hashes[start : start + len(places)]
        slots = self.blocks.places(hashes[: start + len(places)], start)
        loads = tuple(
            BlockLoad(hash=block_hash, slot=slot, place=place)
            for block_hash, slot, place in zip(wanted, slots, places, strict=True)
        )
        parent = hashes.at(start - 1) if start else None
        reading = ReadSlots(batch=self._next_batch(), parent=parent, loads=loads)
        self._reading[reading.batch] = reading
        self._coming.update((load.hash, reading.batch) for load in loads)
        return reading

    def arrived(self, batch: int) -> ReadSlots:
        reading = self._reading.pop(batch)
        for load in reading.loads:
            del self._coming[load.hash]
        return reading

    def tenant(self, block_hash: BlockHash) -> str:
        at = self.blocks.find(block_hash)
        return self.blocks.tenant(at) if at is not None else ""

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
        assert self._queued == sum(map(len, self._queue.values()))
        coming = {load.hash: r.batch for r in self._reading.values() for load in r.loads}
        assert coming == self._coming


def _new_chain(spills: Sequence[tuple[Spill, str]]) -> NewChain:
    first, tenant = spills[0]
    return NewChain(
        parent=first.parent,
        hashes=BlockHashes.of(spill.hash for spill, _ in spills),
        places=array("i", [spill.slot for spill, _ in spills]),
        tenant=tenant,
    )
