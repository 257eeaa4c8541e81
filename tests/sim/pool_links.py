"""A simulated worker's link to its host's pool, and a thread that carries blocks in batches, half
by half, so that it can be overtaken at any point. What is carried is checked block by block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvpool.core.blocks.device_blocks import Place
from kvpool.core.fetch.client_events import (
    BlocksFetched,
    BlocksStored,
    ClientCommand,
    ClientEvent,
    FetchBlocks,
    FromNode,
    NodeOrder,
    OfferBlocks,
    PoolJoined,
    PoolLost,
    PrefixFetched,
    SendPool,
    StoreBlocks,
    WantPrefix,
)
from kvpool.core.layout.hashes import BlockHash
from kvpool.core.node.messages import FromPool, PoolWelcome, ToPool
from kvrelay.types import RequestKey
from tests.sim.contents import Content, checksum, put_block, stands_for, take_block, torn
from tests.sim.pool_node import PoolNode
from tests.sim.worker import Worker


@dataclass(slots=True, eq=False)
class Link:
    """A connection to one life of a node, as the worker's end has it."""

    number: int
    node: PoolNode
    joined: bool = False
    broken: bool = False


@dataclass(slots=True)
class Counts:
    stored: int = 0
    fetched: int = 0
    failed: int = 0
    damaged: int = 0


class SimulatedPoolLinks:
    """Implements cluster.worker.loop.Pools."""

    def __init__(self, worker: Worker, send: Callable[[Link, ToPool], None]) -> None:
        self._simulation = worker.net
        self._memory = worker.memory
        self._on_news = worker.post
        self._send = send
        self._staging = worker.shape.staging_blocks
        self.incarnation = worker.incarnation
        self.host = worker.shape.host
        self.link: Link | None = None
        self.counts = Counts()
        self._offered: dict[Place, BlockHash] = {}
        self._wants: dict[RequestKey, WantPrefix] = {}
        self._jobs: list[StoreBlocks | FetchBlocks] = []
        self._is_moving = False
        nodes = worker.core.prefixes.nodes
        assert nodes is not None
        self.client = nodes.own
        self._handle = nodes.own.handle
        nodes.own.handle = self._watched  # type: ignore[method-assign]

    def execute(self, order: NodeOrder) -> None:
        match order:
            case SendPool(message=message):
                if self.link is not None and self.link.joined:
                    self._send(self.link, message)
            case StoreBlocks() | FetchBlocks():
                self._jobs.append(order)
                self._work()
            case _:
                raise AssertionError(f"{order}: routers name no other node here")

    def _watched(self, event: ClientEvent, now_s: float) -> list[ClientCommand]:
        """The client of the core; whatever it offers or has fetched is what its name says."""
        match event:
            case OfferBlocks(blocks=blocks):
                for block in blocks:
                    self._offered[block.place] = block.hash
                    self._check(block.place, block.hash)
            case WantPrefix(key=key):
                assert key not in self._wants
                self._wants[key] = event
        commands = self._handle(event, now_s)
        for command in commands:
            if isinstance(command, PrefixFetched):
                self._check_fetched(command)
        return commands

    def heard(self, message: FromPool) -> None:
        assert self.link is not None
        if isinstance(message, PoolWelcome):
            self.link.joined = True
            self._on_news(PoolJoined(welcome=message))
        else:
            assert self.link.joined
            self._on_news(FromNode(message=message))

    def lost(self) -> None:
        link, self.link = self.link, None
        if link is not None and link.joined:
            self._on_news(PoolLost(reason="lost"))

    def _check_fetched(self, event: PrefixFetched) -> None:
        wanted = self._wants.pop(event.key)
        for i in range(event.blocks):
            self._check(wanted.targets[i], wanted.hashes[wanted.skip + i])
        self.counts.fetched += event.blocks

    def _check(self, place: Place, block_hash: BlockHash) -> None:
        content = take_block(self._memory, place)
        assert stands_for(content, block_hash, self._memory.layout.block_size), "a wrong block"

    # --- the pool's thread ----------------------------------------------------------------------

    def _work(self) -> None:
        if self._is_moving or not self._jobs:
            return
        job = min(self._jobs, key=lambda job: isinstance(job, StoreBlocks))
        self._jobs.remove(job)
        link = self.link
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
        return self.link is not link and self._simulation.random.random() < 0.5

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
            )
        )

    def _end(self, news: BlocksStored | BlocksFetched) -> None:
        self._is_moving = False
        self._on_news(news)
        self._work()
