"""A simulated worker's links to pool nodes, and a thread that carries blocks in batches, half by
half, so that it can be overtaken at any point. What is carried is checked block by block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.core.worker.prefixes import PrefixOutcome
from kvpool.core.blocks.device_blocks import Place
from kvpool.core.blocks.holding import places
from kvpool.core.fetch.client_events import (
    OWN_NODE,
    BlocksFetched,
    BlocksStored,
    CloseNode,
    ConnectNode,
    FetchBlocks,
    FromNode,
    NodeEvent,
    NodeOrder,
    OfferBlocks,
    PoolJoined,
    PoolLost,
    SendPool,
    StoreBlocks,
)
from kvpool.core.fetch.fetches import LEFT, Fetch, Restored
from kvpool.core.layout.hashes import BlockHash
from kvpool.core.node.messages import FromPool, PoolWelcome, ToPool
from kvrelay.types import Incarnation
from tests.sim.contents import Content, checksum, put_block, stands_for, take_block, torn
from tests.sim.pool_node import PoolNode
from tests.sim.worker import Worker


@dataclass(slots=True, eq=False)
class Link:
    """A connection to one life of a node, as the worker's end has it. It calls the node `name`."""

    number: int
    node: PoolNode
    name: Incarnation = OWN_NODE
    joined: bool = False
    broken: bool = False


@dataclass(slots=True)
class Counts:
    stored: int = 0
    fetched: int = 0
    failed: int = 0
    damaged: int = 0


class Wires(Protocol):
    def send(self, link: Link, message: ToPool) -> None: ...

    def reach(self, side: SimulatedPoolLinks, node: Incarnation) -> None:
        """Links to the node of another host, or tells that it can't."""


class SimulatedPoolLinks:
    """Implements cluster.worker.loop.Pools."""

    def __init__(self, worker: Worker, wires: Wires) -> None:
        self._simulation = worker.net
        self._memory = worker.memory
        self._on_news = worker.post
        self._wires = wires
        self._staging = worker.shape.staging_blocks
        self.incarnation = worker.incarnation
        self.host = worker.shape.host
        self.links: dict[Incarnation, Link] = {}
        self.counts = Counts()
        self._offered: dict[Place, BlockHash] = {}
        self._jobs: list[StoreBlocks | FetchBlocks] = []
        self._is_moving = False
        lookup = worker.core.lookup
        assert lookup.pool is not None
        self.stores = lookup.pool.nodes.stores
        self._tables, self._fetches = lookup.tables, lookup.fetches
        self._offer, self._handle = self.stores.offer, worker.core.prefixes.on_node
        self.stores.offer = self._offers  # type: ignore[method-assign]
        worker.core.prefixes.on_node = self._handled  # type: ignore[method-assign]

    @property
    def link(self) -> Link | None:
        """To the node of its host."""
        return self.links.get(OWN_NODE)

    def execute(self, order: NodeOrder) -> None:
        match order:
            case SendPool(message=message, node=node):
                link = self.links.get(node)
                if link is not None and link.joined:
                    self._wires.send(link, message)
            case StoreBlocks() | FetchBlocks():
                self._jobs.append(order)
                self._work()
            case ConnectNode(node=node):
                self._wires.reach(self, node)
            case CloseNode(node=node):
                assert node not in self.links, "it was told that the link is lost"

    # Whatever the core offers or has fetched is what its name says.

    def _offers(self, offer: OfferBlocks, now_s: float) -> None:
        for block in offer.blocks:
            self._offered[block.place] = block.hash
            self._check(block.place, block.hash)
        self._offer(offer, now_s)

    def _handled(self, event: NodeEvent, now_s: float) -> list[PrefixOutcome]:
        fetch = None
        if isinstance(event, BlocksFetched):
            fetch = self._fetches.get(event.request_no)
        outcomes = self._handle(event, now_s)
        if fetch is not None:
            self._check_fetched(fetch, outcomes)
        return outcomes

    def heard(self, link: Link, message: FromPool) -> None:
        if isinstance(message, PoolWelcome):
            link.joined = True
            self._on_news(PoolJoined(welcome=message, node=link.name))
        else:
            assert link.joined
            self._on_news(FromNode(message=message, node=link.name))

    def lost(self, link: Link) -> None:
        del self.links[link.name]
        if link.joined or link.name != OWN_NODE:
            self.unreachable(link.name)

    def unreachable(self, node: Incarnation) -> None:
        self._on_news(PoolLost(reason="lost", node=node))

    def _check_fetched(self, fetch: Fetch, outcomes: list[PrefixOutcome]) -> None:
        if fetch.holder.side == LEFT:
            assert not outcomes, "its request goes on in other blocks"
            return
        (restored,) = outcomes
        assert isinstance(restored, Restored) and restored.holder == fetch.holder
        end = restored.tokens // self._memory.layout.block_size
        tables = self._tables.tables(fetch.holder)
        for index, place in enumerate(places(tables, range(fetch.here, end)), fetch.here):
            self._check(place, fetch.hashes[index])
        self.counts.fetched += end - fetch.here

    def _check(self, place: Place, block_hash: BlockHash) -> None:
        content = take_block(self._memory, place)
        assert stands_for(content, block_hash, self._memory.layout.block_size), "a wrong block"

    # --- the pool's thread ----------------------------------------------------------------------

    def _work(self) -> None:
        if self._is_moving or not self._jobs:
            return
        job = min(self._jobs, key=lambda job: isinstance(job, StoreBlocks))
        self._jobs.remove(job)
        link = self.links.get(job.node)
        self._is_moving = True
        if link is None or not link.joined or link.node.region != job.region:
            self._later(lambda: self._over(job, [], "no such region"))
        elif isinstance(job, StoreBlocks):
            self._store(job, link, [])
        else:
            self._fetch(job, link, 0)

    def _later(self, action: Callable[[], None]) -> None:
        slow = self._simulation.random.choice([0.002, 0.01, 0.01, 0.2])
        name = self.incarnation
        self._simulation.by(name, f"pool thread {name}", action, slow)

    def _cut_off(self, link: Link) -> bool:
        """Memory that is mapped may be read and written still."""
        return self.links.get(link.name) is not link and self._simulation.random.random() < 0.5

    def _store(self, job: StoreBlocks, link: Link, sums: list[int]) -> None:
        """The next batch: gather, sum, write."""
        batch = range(len(sums), min(len(job.places), len(sums) + self._staging))
        rows: list[Content] = []

        def gather() -> None:
            for i in batch:
                self._check(job.sources[i], self._offered[job.sources[i]])
                rows.append(take_block(self._memory, job.sources[i]))
                place = job.places[i]
                link.node.places[place] = torn(link.node.places[place], rows[-1])
            self._later(write)

        def write() -> None:
            for i, row in zip(batch, rows, strict=True):
                link.node.places[job.places[i]] = row
            sums.extend(map(checksum, rows))
            if len(sums) == len(job.places):
                self._over(job, sums, None)
            elif self._cut_off(link):
                self._over(job, sums, "cut off")
            else:
                self._store(job, link, sums)

        self._later(gather)

    def _fetch(self, job: FetchBlocks, link: Link, done: int) -> None:
        """The next batch: read, check, scatter."""
        batch = range(done, min(len(job.places), done + self._staging))
        first: list[Content] = []

        def read() -> None:
            first.extend(link.node.places[job.places[i]] for i in batch)
            self._later(scatter)

        def scatter() -> None:
            sound = done
            for i, begun in zip(batch, first, strict=True):
                row = torn(link.node.places[job.places[i]], begun)
                if checksum(row) != job.checksums[i]:
                    break
                put_block(self._memory, job.targets[i], row)
                sound += 1
            if sound < batch.stop or sound == len(job.places):
                self._fetched(job, sound, None)
            elif self._cut_off(link):
                self._fetched(job, sound, "cut off")
            else:
                self._fetch(job, link, sound)

        self._later(read)

    def _over(self, job: StoreBlocks | FetchBlocks, sums: list[int], error: str | None) -> None:
        if isinstance(job, FetchBlocks):
            self._fetched(job, 0, error)
            return
        self.counts.stored += len(sums)
        self.counts.failed += error is not None
        self._end(
            BlocksStored(
                request_no=job.request_no,
                region=job.region,
                checksums=() if error else tuple(sums),
                error=error,
                node=job.node,
            )
        )

    def _fetched(self, job: FetchBlocks, sound: int, error: str | None) -> None:
        damaged = error is None and sound < len(job.places)
        self.counts.failed += error is not None
        self.counts.damaged += damaged
        self._end(
            BlocksFetched(
                request_no=job.request_no,
                region=job.region,
                sound_blocks=sound,
                damaged=damaged,
                error=error,
                node=job.node,
            )
        )

    def _end(self, news: BlocksStored | BlocksFetched) -> None:
        self._is_moving = False
        self._on_news(news)
        self._work()
