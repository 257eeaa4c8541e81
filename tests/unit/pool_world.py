"""A pool node's core and some workers' lookups over a simulated link, disk and memory.

Messages, transfers and disk jobs end in any order that the real ones can, connections break at any
moment, and a worker that was cut off still ends the write that it was at. A block's content is its
own hash, so a wrong block that is taken for right is seen.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from kvpool.core.blocks.eviction import open_policy
from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.client_events import (
    BlocksFetched,
    BlocksStored,
    FetchBlocks,
    FromNode,
    NodeEvent,
    OfferBlocks,
    OfferConfirmed,
    OfferedBlock,
    OfferSettled,
    PoolJoined,
    PoolLost,
    SendPool,
    StoreBlocks,
)
from kvpool.core.fetch.cost import RestoreCost
from kvpool.core.fetch.fetches import Restored
from kvpool.core.fetch.pool_nodes import PING
from kvpool.core.fetch.pool_stores import PoolStores
from kvpool.core.fetch.prefix_lookup import PoolUse, PrefixLookup
from kvpool.core.layout.hashes import BlockHash, BlockHashes
from kvpool.core.layout.layout import BlockId, KvLayout, LayerGroup, Plane
from kvpool.core.node.events import (
    DropRouter,
    DropWorker,
    FromPoolWorker,
    PoolCommand,
    PoolEvent,
    PoolTick,
    PoolWorkerJoined,
    PoolWorkerLost,
    ReadSlots,
    RouterCall,
    RouterCalled,
    RouterHungUp,
    RouterTook,
    SlotOutcome,
    SlotsRead,
    SlotsWritten,
    TellRouter,
    TellWorker,
    WriteSlots,
)
from kvpool.core.node.host_tier import HostTier
from kvpool.core.node.messages import FromPool, LookedUp, LookupWanted, PoolWelcome, ToPool
from kvpool.core.node.restored import RestoredBlock, restore
from kvpool.core.node.tier_blocks import PoolPlace, TierBlocks
from kvrelay.messages import PoolUpdate
from kvrelay.types import Incarnation, RequestKey, Tier
from router.core.state.directory import Directory
from tests.unit.naive_tree import hashes_of

LEASE_TTL_S = 30.0
PATIENCE_S = 5.0


def checksum_of(content: BlockHash | None) -> int:
    return int.from_bytes((content or b"")[:8], "little")


def _is_served(blocks: TierBlocks, block_hash: BlockHash) -> bool:
    """With its whole chain."""
    name: BlockHash | None = block_hash
    while name is not None and blocks.serves(name):
        at = blocks.find(name)
        assert at is not None
        name = blocks.parent(at)
    return name is None


_PLANES = (Plane(name="k", heads=1, dim=1),)
LAYOUT = KvLayout(groups=(LayerGroup(layers=(0,), planes=_PLANES),), dtype="float32", block_size=1)
_FETCH_BLOCKS = 1000
"""Of a worker's memory. Blocks behind them are offered."""


@dataclass(slots=True)
class Want:
    """The first `skip` blocks are the worker's own. `void`: it is dropped, or the node has not held
    what it granted until now."""

    hashes: BlockHashes
    skip: int
    void: bool = False


@dataclass(slots=True)
class Worker:
    name: Incarnation
    lookup: PrefixLookup
    pool: PoolUse
    connected: bool = False
    to_node: deque[ToPool] = field(default_factory=deque)
    to_worker: deque[FromPool] = field(default_factory=deque)
    jobs: deque[StoreBlocks | FetchBlocks] = field(default_factory=deque)
    memory: dict[BlockId, BlockHash] = field(default_factory=dict)
    offers: dict[int, tuple[BlockHash, ...]] = field(default_factory=dict)
    unconfirmed: set[int] = field(default_factory=set)
    wants: dict[Holder, Want] = field(default_factory=dict)
    fetched: int = 0

    @property
    def tables(self) -> BlockTables:
        return self.lookup.tables

    @property
    def is_pinging(self) -> bool:
        """Its ping, or the answer, is on its way: until then it asks nothing."""
        on_their_way = (*self.to_node, *self.to_worker)
        kinds = (LookupWanted, LookedUp)
        return any(isinstance(one, kinds) and one.request_no == PING for one in on_their_way)

    def lose_grants(self) -> None:
        for want in self.wants.values():
            want.void = True


def _worker(name: str) -> Worker:
    """It names nothing that it fetches, so that it fetches it again."""
    tables, cost = BlockTables(LAYOUT, _FETCH_BLOCKS, caching=False), RestoreCost(1)
    stores = PoolStores(max_waiting_blocks=8, batch_blocks=3, max_stores=2, patience_s=PATIENCE_S)
    pool = PoolUse(tables, cost, stores)
    lookup = PrefixLookup(tables=tables, cost=cost, pool=pool)
    return Worker(name=Incarnation(name), lookup=lookup, pool=pool)


@dataclass(slots=True)
class Router:
    """`inbox` holds at most the one message that is on its way; `call` None: it hasn't called."""

    directory: Directory = field(default_factory=Directory)
    call: RouterCall | None = None
    inbox: deque[PoolUpdate] = field(default_factory=deque)
    drops: int = 0


class World:
    def __init__(
        self, seed: int, *, places: int = 6, slots: int = 8, workers: int = 3, policy: str = "lru"
    ) -> None:
        self.random = Random(seed)
        self.now_s = 0.0
        self._places, self._slots, self._policy = places, slots, policy
        self._lives = 0
        self._numbers = 0
        self.disk: dict[PoolPlace, tuple[BlockHash, BlockHash | None, BlockHash | None]] = {}
        self.workers = [_worker(f"w{i}") for i in range(workers)]
        self.routers = [Router(), Router()]
        self.restored = 0
        self.start_node()

    def start_node(self) -> None:
        """With what is on disk, and nothing in memory."""
        self._lives += 1
        self.region = f"region-{self._lives}"
        self.content: dict[PoolPlace, BlockHash] = {}
        self.disk_jobs: deque[WriteSlots | ReadSlots] = deque()
        disk = TierBlocks(self._slots, open_policy(self._policy))
        found = [
            RestoredBlock(hash=name, parent=parent, place=slot, written=written)
            for written, (slot, (name, parent, _)) in enumerate(self.disk.items())
        ]
        self.restored = restore(disk, found)
        host = TierBlocks(self._places, open_policy(self._policy))
        self.node = HostTier(host, disk, lease_ttl_s=LEASE_TTL_S)
        self.node.validate()

    # --- what may happen ------------------------------------------------------------------------

    def step(self) -> None:
        worker = self.random.choice(self.workers)
        actions = [
            *[self.deliver_to_node, self.deliver_to_worker, self.run_job] * 12,
            *[self.run_disk, self.offer, self.want] * 3,
            *[self.drop, self.connect],
            *[self.call, self.deliver_to_router, self.deliver_to_router],
        ]
        if self.random.random() < 0.01:
            actions = [self.cut, self.pass_time, self.damage_disk, self.stray_write, self.hang_up]
        if self.random.random() < 0.002:
            actions = [self.restart_node]
        self.random.choice(actions)(worker)
        self.node.validate()
        for each in self.workers:
            each.lookup.validate()
            each.tables.validate()

    def connect(self, worker: Worker) -> None:
        if not worker.connected:
            worker.connected = True
            welcome = PoolWelcome(
                wire_version=1,
                incarnation=self.incarnation,
                region=self.region,
                lease_ttl_s=LEASE_TTL_S,
            )
            self._node(PoolWorkerJoined(worker=worker.name, looks_up=True))
            self._worker(worker, PoolJoined(welcome=welcome))

    def cut(self, worker: Worker) -> None:
        if worker.connected:
            worker.connected = False
            worker.to_node.clear()
            worker.to_worker.clear()
            worker.lose_grants()
            self._node(PoolWorkerLost(worker=worker.name))
            self._worker(worker, PoolLost(reason="cut"))

    def restart_node(self, _: Worker) -> None:
        for worker in self.workers:
            if worker.connected:
                worker.connected = False
                worker.to_node.clear()
                worker.to_worker.clear()
                worker.lose_grants()
                self._worker(worker, PoolLost(reason="the node died"))
        for router in self.routers:
            self._hung_up(router)
        self.start_node()

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(self.region)

    def call(self, _: Worker) -> None:
        router = self.random.choice(self.routers)
        if router.call is None:
            self._numbers += 1
            router.call = RouterCall(self._numbers)
            self._node(RouterCalled(router=router.call))

    def hang_up(self, _: Worker) -> None:
        router = self.random.choice(self.routers)
        if router.call is not None:
            self._node(RouterHungUp(router=router.call))
            self._hung_up(router)

    def _hung_up(self, router: Router) -> None:
        router.call = None
        router.inbox.clear()
        router.directory.lost(self.incarnation)

    def deliver_to_router(self, _: Worker) -> None:
        self.take(self.random.choice(self.routers))

    def take(self, router: Router) -> None:
        if router.inbox and router.call is not None:
            router.directory.updated(router.inbox.popleft())
            router.directory.validate()
            self._node(RouterTook(router=router.call))

    def held(self) -> dict[Tier, set[BlockHash]]:
        """What the node would serve."""
        tiers = {Tier.HOST: self.node.books.host, Tier.DISK: self.node.books.disk.blocks}
        return {
            tier: {block_hash for block_hash in blocks if _is_served(blocks, block_hash)}
            for tier, blocks in tiers.items()
        }

    def deliver_to_node(self, worker: Worker) -> None:
        if worker.to_node:
            message = worker.to_node.popleft()
            self._node(FromPoolWorker(worker=worker.name, message=message))

    def deliver_to_worker(self, worker: Worker) -> None:
        if worker.to_worker:
            message = worker.to_worker.popleft()
            self._worker(worker, FromNode(message=message))

    def pass_time(self, _: Worker) -> None:
        seconds = self.random.choice([1.0, PATIENCE_S, LEASE_TTL_S])
        self.now_s += seconds
        self._node(PoolTick())
        for worker in self.workers:
            if seconds == LEASE_TTL_S:
                worker.lose_grants()
            self._ended(worker, worker.lookup.expire(self.now_s))

    def damage_disk(self, _: Worker) -> None:
        if self.disk:
            slot = self.random.choice(list(self.disk))
            name, parent, _content = self.disk[slot]
            self.disk[slot] = (name, parent, None)

    def mend_disk(self) -> None:
        self.disk = {slot: (name, parent, name) for slot, (name, parent, _) in self.disk.items()}

    def stray_write(self, _: Worker) -> None:
        """What a writer that was cut off may do, at its worst."""
        place = PoolPlace(self.random.randrange(self._places))
        self.content[place] = hashes_of((99,))[0]

    def run_job(self, worker: Worker) -> None:
        if not worker.jobs:
            return
        job = worker.jobs.popleft()
        if isinstance(job, StoreBlocks):
            self._store(worker, job)
        else:
            self._fetch(worker, job)

    def run_disk(self, _: Worker) -> None:
        if not self.disk_jobs:
            return
        match self.disk_jobs.popleft():
            case WriteSlots(batch=batch, spills=spills):
                outcomes = []
                for spill in spills:
                    found = self.content.get(spill.place)
                    if checksum_of(found) != spill.checksum:
                        outcomes.append(SlotOutcome.DAMAGED)
                    elif self.random.random() < 0.03:
                        outcomes.append(SlotOutcome.FAILED)
                    else:
                        self.disk.pop(spill.slot, None)
                        self.disk[spill.slot] = (spill.hash, spill.parent, found)
                        outcomes.append(SlotOutcome.WRITTEN)
                self._node(SlotsWritten(batch=batch, outcomes=tuple(outcomes)))
            case ReadSlots(batch=batch, loads=loads):
                checksums: list[int | None] = []
                for load in loads:
                    name, _parent, found = self.disk.get(load.slot, (None, None, None))
                    sound = name == load.hash == found
                    if found is not None:
                        self.content[load.place] = found
                    checksums.append(checksum_of(found) if sound else None)
                self._node(SlotsRead(batch=batch, checksums=tuple(checksums)))

    # --- what workers do ------------------------------------------------------------------------

    def path(self) -> BlockHashes:
        length = self.random.randint(1, 5)
        tokens = tuple(self.random.choice((0, 0, 0, 1)) for _ in range(length))
        return BlockHashes.of(hashes_of(tokens))

    def offer(self, worker: Worker) -> None:
        hashes = self.path()
        start = self.random.choice((0, 0, self.random.randrange(len(hashes))))
        blocks = []
        for i in range(start, len(hashes)):
            place = self._fresh()
            worker.memory[place] = hashes[i]
            parent = hashes[i - 1] if i else None
            blocks.append(OfferedBlock(hashes[i], parent, (place,)))
        self._numbers += 1
        worker.offers[self._numbers] = tuple(hashes[start:])
        offer = OfferBlocks(offer=self._numbers, blocks=tuple(blocks))
        worker.pool.nodes.stores.offer(offer, self.now_s)
        self._obey_worker(worker)

    def want(self, worker: Worker) -> None:
        hashes = self.path()
        skip = self.random.choice((0, self.random.randrange(len(hashes))))
        self._numbers += 1
        holder = Holder("prefill", RequestKey(str(self._numbers), 0))
        assert worker.tables.try_grow(holder, max(skip, 1), now_s=self.now_s)
        worker.wants[holder] = Want(hashes, skip)
        may_ask, at_end = worker.connected and not worker.is_pinging, len(hashes) <= skip
        begun = worker.lookup.fetches.begin(holder, hashes, skip, None, self.now_s)
        assert begun == (may_ask and not at_end)
        if not begun:
            self._release(worker, holder)
        self._obey_worker(worker)

    def drop(self, worker: Worker) -> None:
        if worker.wants:
            holder = self.random.choice(list(worker.wants))
            worker.wants[holder].void = True
            if not worker.lookup.leave(holder):
                self._release(worker, holder)

    def _release(self, worker: Worker, holder: Holder) -> None:
        del worker.wants[holder]
        worker.tables.release(holder)

    def _fresh(self) -> BlockId:
        self._numbers += 1
        return BlockId(_FETCH_BLOCKS + self._numbers)

    def _store(self, worker: Worker, job: StoreBlocks) -> None:
        names = [worker.memory[source[0]] for source in job.sources]
        if job.region == self.region:
            self.content.update(zip(job.places, names, strict=True))
        failed = self.random.random() < 0.05
        done = BlocksStored(
            request_no=job.request_no,
            region=job.region,
            checksums=() if failed else tuple(checksum_of(name) for name in names),
            error="failed" if failed else None,
        )
        self._worker(worker, done)

    def _fetch(self, worker: Worker, job: FetchBlocks) -> None:
        sound, damaged = 0, False
        for place, checksum, target in zip(job.places, job.checksums, job.targets, strict=True):
            found = self.content.get(place) if job.region == self.region else None
            if damaged or checksum_of(found) != checksum or found is None:
                damaged = True
                continue
            worker.memory[target[0]] = found
            sound += 1
        done = BlocksFetched(
            request_no=job.request_no, region=job.region, sound_blocks=sound, damaged=damaged
        )
        self._worker(worker, done)

    # --- commands -------------------------------------------------------------------------------

    def _node(self, event: PoolEvent) -> None:
        for command in self.node.handle(event, self.now_s):
            self._obey_node(command)

    def _obey_node(self, command: PoolCommand) -> None:
        match command:
            case TellWorker(worker=name, message=message):
                (worker,) = (w for w in self.workers if w.name == name)
                assert worker.connected
                worker.to_worker.append(message)
            case WriteSlots() | ReadSlots():
                self.disk_jobs.append(command)
            case DropWorker(reason=reason):
                raise AssertionError(reason)
            case TellRouter(router=call):
                (router,) = (r for r in self.routers if r.call == call)
                assert not router.inbox, "one message at a time"
                update = PoolUpdate(
                    sequence=command.sequence,
                    node=self.incarnation,
                    workers=command.workers,
                    blocks=command.blocks,
                )
                router.inbox.append(update)
            case DropRouter(router=call):
                (router,) = (r for r in self.routers if r.call == call)
                self._hung_up(router)
                router.drops += 1

    def _worker(self, worker: Worker, event: NodeEvent) -> None:
        self._ended(worker, worker.lookup.on_node(event, self.now_s))

    def _ended(self, worker: Worker, ended: list[Restored]) -> None:
        for one in ended:
            want, table = worker.wants[one.holder], worker.tables.tables(one.holder)[0]
            assert one.tokens == want.skip or not want.void
            worker.fetched += one.tokens - want.skip
            for i in range(want.skip, one.tokens):
                assert worker.memory[table[i]] == want.hashes[i], "wrong KV"
            self._release(worker, one.holder)
        self._obey_worker(worker)

    def _obey_worker(self, worker: Worker) -> None:
        for command in worker.pool.nodes.take_outbox():
            match command:
                case SendPool(message=message):
                    assert worker.connected
                    worker.to_node.append(message)
                case StoreBlocks() | FetchBlocks():
                    worker.jobs.append(command)
                case OfferSettled(offer=offer):
                    del worker.offers[offer]
                    worker.unconfirmed.add(offer)
                case OfferConfirmed(offer=offer):
                    worker.unconfirmed.remove(offer)

    # --- the end --------------------------------------------------------------------------------

    def drain(self) -> None:
        """Everything under way comes to its end."""
        while (
            self.disk_jobs
            or any(w.to_node or w.to_worker or w.jobs for w in self.workers)
            or any(router.inbox for router in self.routers)
        ):
            for router in self.routers:
                self.take(router)
            for worker in self.workers:
                self.deliver_to_node(worker)
                self.deliver_to_worker(worker)
                self.run_job(worker)
            self.run_disk(self.workers[0])
            self.node.validate()
        assert not any(worker.unconfirmed for worker in self.workers)
