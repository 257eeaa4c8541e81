"""The core of a pool node: stores and fetches of workers, in host memory and on disk. Pure.

`handle` is its one door. A block is readable once its writer reports it whole. The writer takes a
checksum before it writes, and every reader compares the bytes with it. So a change by a late writer
is found, and the block is never served.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

from kvpool.core.layout.hashes import BlockHash
from kvpool.core.node.checked_blocks import BlockOrigins, Changes, CheckedBlocks
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
    PoolTier,
    StoreAbandoned,
    Stored,
    StoreGranted,
    StoreWanted,
)
from kvpool.core.node.open_requests import Fetch, Fetches, FetchKey, Store, StoreKey, Stores
from kvpool.core.node.reports import PoolUsage
from kvpool.core.node.tier_blocks import PoolPlace, TierBlocks
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
        if not self.host.is_spoiled(block.hash):
            return block.hash not in self.host
        is_same = self.host.parent(block.hash) == block.parent
        return is_same and not self.fetches.is_reading(block.hash)

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
        self._origins = BlockOrigins()
        self._origins.came(PoolTier.DISK, disk)
        self._changes = Changes(self._origins)
        self._blocks = CheckedBlocks(host, self._changes)
        self._commands: list[PoolCommand] = []
        self.books = PoolUsage(
            host=host,
            disk=self._disk,
            stores=self._stores,
            fetches=self._fetches,
            origins=self._origins,
        )
        self.draining = False
        """Nothing new is stored nor fetched."""

    @property
    def idle(self) -> bool:
        """No worker writes or reads, and all blocks for the disk are there."""
        return not (self._stores or self._fetches or self._disk.waiting)

    def handle(self, event: PoolEvent, now_s: float) -> list[PoolCommand]:
        self._origins.now_s = now_s
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
                self._changes.called(router, host=self._host, disk=self._disk.blocks)
            case RouterTook(router=router):
                self._changes.took(router)
            case RouterHungUp(router=router):
                self._changes.hung_up(router)
            case PoolTick():
                self._stores.expire(now_s)
                for fetch in self._fetches.expire(now_s):
                    self._host.release(fetch.chain)
            case SlotsWritten():
                self._written(event)
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
                self._stored((worker, number), checksums)
            case StoreAbandoned(request_no=number):
                self._close_store((worker, number))
            case FetchWanted() as wanted:
                self._fetch_wanted((worker, wanted.request_no), wanted, now_s)
            case FetchDone(request_no=number, damaged=damaged):
                if (worker, number) not in self._fetches:  # wrong since they were stored
                    self._spoil_on_disk(damaged)
                self._close_fetch((worker, number))
                self._blocks.spoil(damaged)
            case LookupWanted(request_no=number, hashes=hashes):
                self._tell(worker, self._looked_up(number, hashes))
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
        places = self._blocks.room(len(wanted), below=[blocks[i].parent for i in wanted])
        wanted = wanted[: len(places)]
        if wanted:
            taken = tuple(blocks[i] for i in wanted)
            deadline_s = now_s + self._lease_ttl_s
            store = Store(blocks=taken, places=places, since_s=now_s, deadline_s=deadline_s)
            self._stores.open(key, store)
        granted = StoreGranted(request_no=key[1], indices=tuple(wanted), places=places)
        return self._tell(key[0], granted)

    def _stored(self, key: StoreKey, checksums: Sequence[int]) -> None:
        store = self._stores.close(key)
        if store is None:
            return
        if store.fenced or len(checksums) != len(store.places):
            self._host.give_back(store.places)
            if not store.fenced:
                self._drop(key[0], f"{len(checksums)} checksums of {len(store.places)} blocks")
            return
        self._origins.labelled(store.blocks)
        of = dict(zip((block.hash for block in store.blocks), checksums, strict=True))
        for run in store.runs():
            self._adopt(run[0][0].parent, [(block.hash, place) for block, place in run], of)

    def _adopt(
        self,
        parent: BlockHash | None,
        run: Sequence[tuple[BlockHash, PoolPlace]],
        checksums: dict[BlockHash, int],
    ) -> None:
        new = self._blocks.adopt(parent, run, checksums)
        self._disk.want(new, self._host)

    def _close_store(self, key: StoreKey) -> None:
        store = self._stores.close(key)
        if store is not None:
            self._host.give_back(store.places)

    # --- fetch ----------------------------------------------------------------------------------

    def _looked_up(self, request_no: int, hashes: Sequence[BlockHash]) -> LookedUp:
        in_host = self._host.match(hashes)
        on_disk = max(0, self._disk.blocks.match(hashes) - in_host)
        return LookedUp(request_no=request_no, host_blocks=in_host, disk_blocks=on_disk)

    def _fetch_wanted(self, key: FetchKey, wanted: FetchWanted, now_s: float) -> None:
        if key in self._fetches:
            return self._drop(key[0], f"request {key[1]} is open already")
        on_disk = self._disk.blocks.match(wanted.hashes)
        self._disk.blocks.touch(wanted.hashes[:on_disk])
        hashes = () if self.draining else wanted.hashes
        chain = self._host.hold(hashes)
        loads = self._load(hashes[:on_disk], len(chain))
        fetch = Fetch(hashes=hashes, skip=wanted.skip, loads=loads, chain=chain, since_s=now_s)
        self._fetches.open(key, fetch)
        return None if loads else self._serve(key, fetch, now_s)

    def _load(self, on_disk: Sequence[BlockHash], in_host: int) -> set[int]:
        """Starts to read the blocks behind the chain's first `in_host`. Returns the reads to wait
        for."""
        waits, wanted = self._disk.absent(on_disk[in_host:])
        # What stands behind a block that is spoiled in memory waits until that is stored anew.
        if not wanted or wanted[0] in self._host:
            return waits
        places = self._blocks.room(len(wanted), below=[self._disk.blocks.parent(wanted[0])])
        if places:
            reading = self._disk.read(wanted, places)
            self._commands.append(reading)
            waits.add(reading.batch)
        return waits

    def _read(self, event: SlotsRead, now_s: float) -> None:
        reading = self._disk.arrived(event.batch)
        good = next((i for i, c in enumerate(event.checksums) if c is None), len(reading.loads))
        self._host.give_back(load.place for load in reading.loads[good:])
        self._spoil_on_disk(
            load.hash
            for load, checksum in zip(reading.loads, event.checksums, strict=True)
            if checksum is None
        )
        if good:
            run = [(load.hash, load.place) for load in reading.loads[:good]]
            found = {h: c for (h, _), c in zip(run, event.checksums, strict=False) if c is not None}
            self._adopt(reading.parent, run, found)
        for key, fetch in self._fetches.loaded(event.batch):
            self._serve(key, fetch, now_s)

    def _serve(self, key: FetchKey, fetch: Fetch, now_s: float) -> None:
        waited_with, fetch.chain = fetch.chain, self._host.hold(fetch.hashes)
        self._host.release(waited_with)
        fetch.deadline_s = now_s + self._lease_ttl_s
        blocks = fetch.chain[fetch.skip :]
        if not blocks:
            self._close_fetch(key)
        fetched = Fetched(
            request_no=key[1],
            places=tuple(self._host.place(block.hash) for block in blocks),
            checksums=tuple(self._blocks.checksums[block.hash] for block in blocks),
        )
        self._tell(key[0], fetched)

    def _close_fetch(self, key: FetchKey) -> None:
        fetch = self._fetches.close(key)
        if fetch is not None:
            self._host.release(fetch.chain)

    # --- disk -----------------------------------------------------------------------------------

    def _write_behind(self) -> None:
        found = self._disk.next_write(self._host, self._blocks.checksums)
        if found is not None:
            writing, room = found
            self._changes.removed(PoolTier.DISK, room.evicted)
            self._commands.append(writing)

    def _written(self, event: SlotsWritten) -> None:
        new, damaged = self._disk.written(event.batch, event.outcomes)
        self._changes.stored(PoolTier.DISK, new)
        still = [
            s.hash for s in damaged if s.hash in self._host and self._host.place(s.hash) == s.place
        ]
        self._blocks.spoil(still)

    def _spoil_on_disk(self, damaged: Iterable[BlockHash]) -> None:
        gone = [block_hash for block_hash in damaged if self._disk.blocks.spoil(block_hash)]
        self._changes.removed(PoolTier.DISK, gone)

    def validate(self) -> None:
        """Every place is in exactly one state, and every hold has its holder."""
        self._blocks.validate()
        self._disk.validate()
        self._stores.validate()
        self._origins.validate()
        held = [*self._stores.places(), *self._disk.host_places()]
        assert len(set(held)) == len(held) and set(held) == self._host.reserved
        assert self.books.orphaned() == 0, f"{self.books.orphaned()} orphaned places"
