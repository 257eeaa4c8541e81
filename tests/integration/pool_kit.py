"""A real pool node process, and workers' pool sides without the rest of a worker.

`python -m tests.integration.pool_kit ADDRESS`: a worker that stops for ever once it may write.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import torch

from cluster.cli import main as cli
from cluster.worker.pool.links import PoolLinks
from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.client_events import (
    OWN_NODE,
    NodeEvent,
    OfferBlocks,
    OfferConfirmed,
    OfferedBlock,
    OfferSettled,
    PoolAnswer,
    PoolJoined,
)
from kvpool.core.fetch.cost import RestoreCost
from kvpool.core.fetch.fetches import Restored
from kvpool.core.fetch.pool_stores import PoolStores
from kvpool.core.fetch.prefix_lookup import PoolUse, PrefixLookup
from kvpool.core.layout.hashes import BlockHash, BlockHashes, block_hashes, cache_salt
from kvpool.core.layout.layout import BlockId, KvLayout, LayerGroup, Plane, Tables
from kvpool.memory.kv_memory import KvMemory
from kvpool.transport.endpoints import EndpointOptions
from kvrelay.messages import PrefixSource
from kvrelay.types import Incarnation, RequestKey
from tests.forks import forks
from tests.integration.ray_head import until

PATIENCE_S = 30.0
BLOCKS = 64
_SALT = cache_salt(fingerprint="f", physical_format="p", tenant="t")


def layout(dim: int = 64) -> KvLayout:
    """64 KiB a block."""
    planes = (Plane(name="k", heads=4, dim=dim), Plane(name="v", heads=4, dim=dim))
    groups = (LayerGroup(layers=(0, 1, 2, 3), planes=planes),)
    return KvLayout(groups=groups, dtype="bfloat16", block_size=16)


def chain(name: int, blocks: int) -> tuple[BlockHash, ...]:
    """Chains of different names share nothing."""
    return tuple(block_hashes([name] * blocks, block_size=1, salt=_SALT))


class _ChosenBlocks(BlockTables):
    """All that is held is `first_block` and the blocks after it."""

    first_block = 0

    def tables(self, holder: Holder) -> Tables:
        (table,) = super().tables(holder)
        return (tuple(BlockId(self.first_block + i) for i in range(len(table))),)


class _Found(RestoreCost):
    """What was found last; it is fetched if it is `wanted`."""

    wanted = True
    blocks = (0, 0)

    def fetches(self, host_blocks: int, disk_blocks: int) -> int:
        self.blocks = (host_blocks, disk_blocks)
        return (host_blocks + disk_blocks) * self.wanted


class PoolWorker:
    """Every block of its memory holds random numbers of its own."""

    def __init__(
        self,
        address: str,
        *,
        seed: int = 0,
        kv: KvLayout | None = None,
        fingerprint: str = "5a" * 16,
        secret: bytes = b"",
        far_transports: tuple[str, ...] = (),
    ) -> None:
        self.memory = KvMemory(kv or layout(), BLOCKS, "cpu")
        generator = torch.Generator().manual_seed(seed)
        for plane in self.memory.planes[0]:
            plane.copy_(torch.randn(plane.shape, generator=generator))
        self.inbox: queue.SimpleQueue[NodeEvent | BaseException] = queue.SimpleQueue()
        self.answers: list[PoolAnswer | Restored] = []
        self._numbers = 0
        self._tables = _ChosenBlocks(self.memory.layout, BLOCKS, caching=False)
        self._cost = _Found(self.memory.layout.block_size)
        self._pool = PoolUse(self._tables, self._cost)
        self._lookup = PrefixLookup(tables=self._tables, cost=self._cost, pool=self._pool)
        self.links = PoolLinks(
            self.memory,
            address=address,
            incarnation=Incarnation(uuid4().hex),
            fingerprint=fingerprint,
            looks_up=True,
            post=self.inbox.put,
            crashed=self.inbox.put,
            options=EndpointOptions(secret=secret),
            far_transports=far_transports,
        )
        self.links.start()

    @property
    def stores(self) -> PoolStores:
        return self._pool.nodes.stores

    def pump(self, timeout_s: float = 0.05) -> None:
        """Settle what has come in."""
        try:
            event = self.inbox.get(timeout=timeout_s)
        except queue.Empty:
            self.answers += self._lookup.expire(time.monotonic())
        else:
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, PoolJoined):
                self.node = event.welcome.incarnation
            self.answers += self._lookup.on_node(event, time.monotonic())
        self._execute()

    def _execute(self) -> None:
        for command in self._pool.nodes.take_outbox():
            if isinstance(command, PoolAnswer):
                self.answers.append(command)
            else:
                self.links.execute(command)

    def await_connected(self, wanted: bool = True) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while self.stores.connected != wanted:
            assert time.monotonic() < deadline_s, "the pool node did not come or go"
            self.pump()

    def answer(self) -> PoolAnswer | Restored:
        deadline_s = time.monotonic() + PATIENCE_S
        while not self.answers:
            assert time.monotonic() < deadline_s, "no answer"
            self.pump()
        return self.answers.pop(0)

    def offer(self, hashes: tuple[BlockHash, ...], first_block: int = 0) -> int:
        self._numbers += 1
        parents = (None, *hashes)
        blocks = tuple(
            OfferedBlock(name, parent, (BlockId(first_block + i),))
            for i, (name, parent) in enumerate(zip(hashes, parents, strict=False))
        )
        self.stores.offer(OfferBlocks(offer=self._numbers, blocks=blocks), time.monotonic())
        self._execute()
        return self._numbers

    def store(self, hashes: tuple[BlockHash, ...], first_block: int = 0) -> None:
        offer = self.offer(hashes, first_block)
        assert self.answer() == OfferSettled(offer=offer)
        assert self.answer() == OfferConfirmed(offer=offer)

    def seek(self, hashes: tuple[BlockHash, ...]) -> tuple[int, int]:
        """Blocks in memory and on disk of its host's node."""
        self._cost.blocks, self._cost.wanted = (0, 0), False
        self.want(hashes, 0)
        self._fetched()
        self._cost.wanted = True
        return self._cost.blocks

    def want(
        self, hashes: tuple[BlockHash, ...], first_block: int, source: PrefixSource | None = None
    ) -> Holder:
        self._numbers += 1
        holder = Holder("prefill", RequestKey("want", self._numbers))
        self._tables.first_block = first_block
        names, now_s = BlockHashes.of(hashes), time.monotonic()
        assert self._tables.try_grow(holder, 1, now_s=now_s)
        if not self._lookup.fetches.begin(holder, names, 0, source, now_s):
            self.answers.append(Restored.found_here(holder, 0))
        self._execute()
        return holder

    def _fetched(self) -> int:
        ended = self.answer()
        assert isinstance(ended, Restored)
        self._tables.release(ended.holder)
        return ended.tokens // self.memory.layout.block_size

    def fetch(self, hashes: tuple[BlockHash, ...], first_block: int = 0) -> int:
        """Blocks that were fetched, into blocks `first_block` and on."""
        self.want(hashes, first_block)
        return self._fetched()

    def fetch_far(
        self, node: Incarnation, address: str, hashes: tuple[BlockHash, ...], first_block: int = 0
    ) -> int:
        """From the node of another host, into blocks `first_block` and on."""
        source = PrefixSource(
            peer=node, addresses=(address,), blocks=len(hashes), is_pool_node=True
        )
        self.want(hashes, first_block, source)
        return self._fetched()

    def blocks(self, first: int, count: int) -> list[torch.Tensor]:
        size = self.memory.layout.block_size
        return [plane[:, first * size : (first + count) * size] for plane in self.memory.planes[0]]

    def close(self) -> None:
        self.links.close()


@contextmanager
def pool_worker(address: str, **options: object) -> Iterator[PoolWorker]:
    worker = PoolWorker(address, **options)  # type: ignore[arg-type]
    try:
        yield worker
    finally:
        worker.close()


class Node:
    """`kvrelay pool-node OPTIONS` as a process of its own, forked from one that has torch."""

    def __init__(self, log: Path, name: str, *options: str) -> None:
        """Returns once it listens."""
        self.log = log
        self._process = forks().Process(target=_run_command, args=(log, (name, *options)))
        self._process.start()
        ready = "internal gRPC on "
        until(lambda: log.exists() and (ready in log.read_text() or not self._process.is_alive()))
        assert self._process.is_alive(), self.text

    @property
    def text(self) -> str:
        return self.log.read_text()

    def addresses(self) -> list[str]:
        return re.findall(r"pool node of \S+ on (\S+)\n", self.text)

    @property
    def grpc_address(self) -> str:
        """For routers."""
        (found,) = re.findall(r"internal gRPC on (\S+)\n", self.text)
        return str(found)

    def suspend(self) -> None:
        """Returns once none of its threads runs."""
        self.signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self._process.pid}/task")
        until(lambda: all("(stopped)" in (t / "status").read_text() for t in tasks.iterdir()))

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        """As a supervisor does."""
        self.signal(signal.SIGTERM)
        self._process.join(PATIENCE_S)
        assert self._process.exitcode == 0, self.text

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()


def refused(log: Path, name: str, *options: str) -> str:
    """What `kvrelay pool-node OPTIONS` says when it can't start."""
    process = forks().Process(target=_run_command, args=(log, (name, *options)))
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 2, process.exitcode
    return log.read_text()


def _run_command(log: Path, options: tuple[str, ...]) -> None:
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.argv = ["kvrelay", "pool-node", "--name", *options]
    cli.main()


def hang_when_granted(address: str) -> None:
    worker = PoolWorker(address)
    worker.links._movers[OWN_NODE].put = lambda job: print("granted", flush=True)  # type: ignore[method-assign]
    worker.await_connected()
    worker.offer(chain(1, 8))
    while True:
        worker.pump()


if __name__ == "__main__":
    hang_when_granted(sys.argv[1])


@contextmanager
def running_node(folder: Path, name: str, *options: str) -> Iterator[Node]:
    """With 64 MiB; its log is in `folder`."""
    node = Node(folder / f"{name}.log", name, "--host-memory", "64MiB", *options)
    try:
        yield node
    finally:
        if node.is_alive:
            node.stop()
