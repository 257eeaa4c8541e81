"""The core of a pool node: stores and fetches of workers, in host memory and on disk. Pure.

`handle` is its one door. A block is readable once its writer reports it whole. The writer takes a
checksum before it writes, and every reader compares the bytes with it. So a change by a late writer
is found, and the block is never served.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import assert_never

from kvpool.core.layout.hashes import BlockHash, BlockHashes
from kvpool.core.node.changes import Changes
from kvpool.core.node.disk_tier import DiskTier
from kvpool.core.node.events import (
    DropWorker,
    FromPoolWorker,
    PoolCommand,
    PoolEvent,
    PoolTick,
    PoolWorkerJoined,
    PoolWorkerLost,
    RouterCalled,
    RouterHungUp,
    RouterTook,
    SlotsRead,
    SlotsWritten,
    TellWorker,
)
from kvpool.core.node.messages import (
    ChainBlock,
    FetchDone,
    Fetched,
    FetchWanted,
    FromPool,
    LookedUp,
    LookupWanted,
    PoolHello,
    StoreAbandoned,
    StoreConfirmed,
    Stored,
    StoreGranted,
    StoreWanted,
)
from kvpool.core.node.open_requests import Fetch, Fetches, FetchKey, Store, StoreKey, Stores
from kvpool.core.node.reports import PoolUsage
from kvpool.core.node.tier_blocks import (
    NewChain,
    PoolPlace,
    TierBlocks,
    blocks_of,
    places_of,
)
from kvrelay.types import Incarnation


@dataclass(frozen=True, slots=True)
class Storable:
    host: TierBlocks
    disk: DiskTier
    stores: Stores
    fetches: Fetches

    def choose(self, blocks: Sequence[ChainBlock]) -> list[int]:
        """The indices of blocks that are neither here nor coming, and whose parent is."""
        chosen: dict[BlockHash, int] = {}
        for index, block in enumerate(blocks):
            is_new = block.hash not in chosen and self._is_needed(block)
            if is_new and self._has_parent(block, chosen):
                chosen[block.hash] = index
        return list(chosen.values())

    def _is_needed(self, block: ChainBlock) -> bool:
        if self.stores.is_coming(block) or self.disk.is_coming(block.hash):
            return False
        at = self.host.find(block.hash)
        if at is None or not self.host.is_spoiled(at):
            return at is None
        is_same = self.host.parent(at) == block.parent
        return is_same and not self.fetches.is_reading(self.host.run_with(at))

    def _has_parent(self, block: ChainBlock, chosen: dict[BlockHash, int]) -> bool:
        parent = block.parent
        if parent is None or parent in chosen or parent in self.host:
            return True
        return self.stores.is_parent_coming(block) or self.disk.is_coming(parent)


class HostTier:
    def __init__(self, host: TierBlocks, disk: TierBlocks, *, lease_ttl_s: float) -> None:
        self._host = host
        self._disk = DiskTier(disk)
        self._lease_ttl_s = lease_ttl_s
        self._stores = Stores()
        self._fetches = Fetches()
        self._storable = Storable(host, self._disk, self._stores, self._fetches)
        self._workers: set[Incarnation] = set()
        self._changes = Changes(host=host, disk=disk)
        self.checksums = array("Q", [0]) * host.count
        """# place |-> the xxh3_64 that the bytes of the block there must have"""
        self._commands: list[PoolCommand] = []
        self.books = PoolUsage(
            host=host, disk=self._disk, stores=self._stores, fetches=self._fetches
        )
        self.draining = False
        """Nothing new is stored nor fetched."""

    @property
    def idle(self) -> bool:
        """No worker writes or reads, and all blocks for the disk are there."""
        return not (self._stores or self._fetches or self._disk.waiting)

    def handle(self, event: PoolEvent, now_s: float) -> list[PoolCommand]:
        self._settle(event, now_s)
        self._write_behind()
        self._commands += self._changes.flush()
        commands, self._commands = self._commands, []
        return commands

    def _settle(self, event: PoolEvent, now_s: float) -> None:
        match event:
            case PoolWorkerJoined(worker=worker, looks_up=looks_up):
                self._workers.add(worker)
                if looks_up:
                    self._changes.joined(worker)
            case FromPoolWorker():
                if event.worker in self._workers:
                    self._from_worker(event, now_s)
            case PoolWorkerLost(worker=worker):
                self._lost(worker)
            case RouterCalled(router=router):
                self._changes.called(router)
            case RouterTook(router=router):
                self._changes.took(router)
            case RouterHungUp(router=router):
                self._changes.hung_up(router)
            case PoolTick():
                self._stores.expire(now_s)
                for fetch in self._fetches.expire(now_s):
                    self._host.release(fetch.chain)
            case SlotsWritten():
                self._written(event, now_s)
            case SlotsRead():
                self._read(event, now_s)
            case _:
                assert_never(event)

    def _from_worker(self, event: FromPoolWorker, now_s: float) -> None:
        worker = event.worker
        match event.message:
            case StoreWanted() as wanted:
                self._store_wanted((worker, wanted.request_no), wanted.blocks, now_s)
            case Stored(request_no=number, checksums=checksums):
                self._stored((worker, number), checksums, now_s)
            case StoreAbandoned(request_no=number):
                self._close_store((worker, number))
            case FetchWanted() as wanted:
                self._fetch_wanted((worker, wanted.request_no), wanted, now_s)
            case FetchDone(request_no=number, damaged=damaged):
                if (worker, number) not in self._fetches:  # wrong since they were stored
                    _spoil(self._disk.blocks, damaged)
                self._close_fetch((worker, number))
                _spoil(self._host, damaged)
            case LookupWanted(request_no=number, hashes=hashes):
                self._tell(worker, self._looked_up(number, BlockHashes.of(hashes)))
            case PoolHello():
                self._drop(worker, "a second hello")
            case _:
                assert_never(event.message)

    def _tell(self, worker: Incarnation, message: FromPool) -> None:
        self._commands.append(TellWorker(worker=worker, message=message))

    def _drop(self, worker: Incarnation, reason: str) -> None:
        self._commands.append(DropWorker(worker=worker, reason=reason))

    def _lost(self, worker: Incarnation) -> None:
        for store in self._stores.of(worker):
            self._close_store(store)
        for fetch in self._fetches.of(worker):
            self._close_fetch(fetch)
        self._workers.discard(worker)
        self._changes.left(worker)

    # --- store ----------------------------------------------------------------------------------

    def _store_wanted(self, key: StoreKey, blocks: Sequence[ChainBlock], now_s: float) -> None:
        if key in self._stores:
            return self._drop(key[0], f"request {key[1]} is open already")
        wanted = [] if self.draining else self._storable.choose(blocks)
        new = {blocks[i].hash for i in wanted}
        below = [blocks[i].parent for i in wanted if blocks[i].parent not in new]
        places = self._host.reserve(len(wanted), below=below)
        wanted = wanted[: len(places)]
        if wanted:
            taken = tuple(blocks[i] for i in wanted)
            deadline_s = now_s + self._lease_ttl_s
            store = Store(blocks=taken, places=places, since_s=now_s, deadline_s=deadline_s)
            self._stores.open(key, store)
        granted = StoreGranted(request_no=key[1], indices=tuple(wanted), places=places)
        return self._tell(key[0], granted)

    def _stored(self, key: StoreKey, checksums: Sequence[int], now_s: float) -> None:
        store = self._stores.close(key)
        if store is not None and not store.fenced and len(checksums) != len(store.places):
            self._host.give_back(store.places)
            reason = f"{len(checksums)} checksums of {len(store.places)} blocks"
            return self._drop(key[0], reason)
        readable = store is not None and self._take(store, checksums, now_s)
        return self._tell(key[0], StoreConfirmed(request_no=key[1], readable=readable))

    def _take(self, store: Store, checksums: Sequence[int], now_s: float) -> bool:
        """True if all its blocks are readable now."""
        if store.fenced:
            self._host.give_back(store.places)
            return False
        self._note(store.places, checksums)
        chains = store.chains()
        for chain in chains:
            self._adopt(chain, now_s)
        return all(chain.hashes[-1] in self._host for chain in chains)

    def _note(self, places: Sequence[PoolPlace], checksums: Sequence[int]) -> None:
        """No block is in these places yet."""
        for place, checksum in zip(places, checksums, strict=True):
            self.checksums[place] = checksum

    def _adopt(self, chain: NewChain, now_s: float) -> None:
        new = self._host.adopt(chain, now_s)
        self._disk.want(new, self._host)

    def _close_store(self, key: StoreKey) -> None:
        store = self._stores.close(key)
        if store is not None:
            self._host.give_back(store.places)

    # --- fetch ----------------------------------------------------------------------------------

    def _looked_up(self, request_no: int, hashes: BlockHashes) -> LookedUp:
        in_host = self._host.match(hashes)
        on_disk = max(0, self._disk.blocks.match(hashes) - in_host)
        return LookedUp(request_no=request_no, host_blocks=in_host, disk_blocks=on_disk)

    def _fetch_wanted(self, key: FetchKey, wanted: FetchWanted, now_s: float) -> None:
        if key in self._fetches:
            return self._drop(key[0], f"request {key[1]} is open already")
        hashes = BlockHashes.of(wanted.hashes)
        on_disk = self._disk.blocks.touch(hashes)
        if self.draining:
            hashes, on_disk = BlockHashes(), 0
        chain = self._host.hold(hashes)
        loads = self._load(hashes[:on_disk], blocks_of(chain))
        fetch = Fetch(hashes=hashes, skip=wanted.skip, loads=loads, chain=chain, since_s=now_s)
        self._fetches.open(key, fetch)
        return None if loads else self._serve(key, fetch, now_s)

    def _load(self, on_disk: BlockHashes, in_host: int) -> set[int]:
        """Starts to read the blocks behind the chain's first `in_host`. Returns the reads to wait
        for."""
        waits, start = self._disk.absent(on_disk, in_host)
        # What stands behind a block that is spoiled in memory waits until that is stored anew.
        if start >= len(on_disk) or on_disk.at(start) in self._host:
            return waits
        parent = on_disk.at(start - 1) if start else None
        places = self._host.reserve(len(on_disk) - start, below=[parent])
        if places:
            reading = self._disk.read(on_disk, start, places)
            self._commands.append(reading)
            waits.add(reading.batch)
        return waits

    def _read(self, event: SlotsRead, now_s: float) -> None:
        reading = self._disk.arrived(event.batch)
        loads = reading.loads
        sound = takewhile(lambda checksum: checksum is not None, event.checksums)
        checksums = [checksum for checksum in sound if checksum is not None]
        good = len(checksums)
        self._host.give_back(load.place for load in loads[good:])
        tenant = self._disk.tenant(loads[0].hash)
        _spoil(
            self._disk.blocks,
            [
                load.hash
                for load, checksum in zip(loads, event.checksums, strict=True)
                if checksum is None
            ],
        )
        if good:
            places = [load.place for load in loads[:good]]
            self._note(places, checksums)
            chain = NewChain(
                parent=reading.parent,
                hashes=BlockHashes.of(load.hash for load in loads[:good]),
                places=array("i", places),
                tenant=tenant,
            )
            self._adopt(chain, now_s)
        for key, fetch in self._fetches.loaded(event.batch):
            self._serve(key, fetch, now_s)

    def _serve(self, key: FetchKey, fetch: Fetch, now_s: float) -> None:
        waited_with, fetch.chain = fetch.chain, self._host.hold(fetch.hashes)
        self._host.release(waited_with)
        fetch.deadline_s = now_s + self._lease_ttl_s
        places = places_of(fetch.chain, fetch.skip)
        if not places:
            self._close_fetch(key)
        checksums = tuple([self.checksums[place] for place in places])
        self._tell(key[0], Fetched(request_no=key[1], places=places, checksums=checksums))

    def _close_fetch(self, key: FetchKey) -> None:
        fetch = self._fetches.close(key)
        if fetch is not None:
            self._host.release(fetch.chain)

    # --- disk -----------------------------------------------------------------------------------

    def _write_behind(self) -> None:
        writing = self._disk.next_write(self._host, self.checksums)
        if writing is not None:
            self._commands.append(writing)

    def _written(self, event: SlotsWritten, now_s: float) -> None:
        for spill in self._disk.written(event.batch, event.outcomes, now_s):
            at = self._host.find(spill.hash)
            if at is not None and self._host.place(at) == spill.place:
                self._host.spoil(spill.hash)

    def validate(self) -> None:
        """Every place is in exactly one state, and every hold has its holder."""
        self._host.validate()
        self._disk.validate()
        self._stores.validate()
        held = [*self._stores.places(), *self._disk.host_places()]
        assert len(set(held)) == len(held) and set(held) == self._host.reserved
        assert self.books.orphaned() == 0, f"{self.books.orphaned()} orphaned places"


def _spoil(tier: TierBlocks, damaged: Iterable[BlockHash]) -> None:
    for block_hash in damaged:
        tier.spoil(block_hash)
