"""What a pool node holds, as routers hear it over gRPC: in time, late, too slowly, and of its next
life."""

from __future__ import annotations

import asyncio
import signal
import socket
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest

from cluster.core.settings import host_pool_address
from cluster.pool_node.service import LineOpened, PoolNodeService, RouterLine
from cluster.process.net import bind_port, grpc_server
from kvpool.core.blocks.eviction import open_policy
from kvpool.core.layout.hashes import HASH_BYTES, BlockHash, BlockHashes
from kvpool.core.node import changes
from kvpool.core.node.changes import Changes
from kvpool.core.node.events import DropRouter, RouterCall, RouterHungUp, RouterTook, TellRouter
from kvpool.core.node.tier_blocks import NewChain, TierBlocks
from kvrelay.messages import PoolUpdate
from kvrelay.types import WIRE_VERSION, Incarnation, Tier
from kvrelay.v1 import pool_node_pb2 as pb
from kvrelay.v1 import pool_node_pb2_grpc
from router.core.events import PoolNodeLost, PoolNodeSaid
from router.core.state.directory import Directory
from router.live import pool_nodes
from router.live.pool_nodes import PoolNodes
from tests.access import ACCESS
from tests.integration.faces_kit import in_loop
from tests.integration.pool_kit import Node, PoolWorker, chain, pool_worker
from tests.unit.directory_kit import Named, known

PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_nodes, "PERIOD_S", 0.05)


class Router:
    """The client of a router and its directory."""

    def __init__(self, *addresses: str) -> None:
        self.directory = Directory()
        self.updates: list[PoolUpdate] = []
        self.lost = 0
        self.nodes = PoolNodes(self._post, ACCESS)
        for address in addresses:
            self.nodes.add(address)

    def _post(self, event: PoolNodeSaid | PoolNodeLost) -> None:
        if isinstance(event, PoolNodeLost):
            self.lost += 1
            self.directory.lost(event.node)
        else:
            self.updates.append(event.update)
            self.directory.updated(event.update)

    def knows(self, hashes: tuple[BlockHash, ...]) -> bool:
        return len(hashes) in self.directory.longest(Named(hashes)).values()

    @property
    def blocks(self) -> int:
        return self.directory.blocks


@asynccontextmanager
async def router(*addresses: str) -> AsyncIterator[Router]:
    one = Router(*addresses)
    try:
        yield one
    finally:
        await one.nodes.close()
        assert one.blocks == 0, "what a node held is forgotten with its stream"
        one.directory.validate()


async def until(condition: Callable[[], bool], what: str) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + PATIENCE_S
    while not condition():
        assert loop.time() < deadline_s, f"gave up waiting until {what}"
        await asyncio.sleep(0.01)


# --- a real node ---------------------------------------------------------------------------------


@contextmanager
def node_at(folder: Path, name: str, port: int, *options: str) -> Iterator[Node]:
    """`port` is that of its gRPC service. It is killed at the end, if it lives."""
    ports = ("--set", f"network.port_range=[{port}, {port}]")
    node = Node(folder / uuid4().hex, name, "--host-memory", "64MiB", *ports, *options)
    try:
        yield node
    finally:
        node.kill()


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


async def stored(worker: PoolWorker, hashes: tuple[BlockHash, ...]) -> None:
    await asyncio.to_thread(worker.await_connected)
    await asyncio.to_thread(worker.store, hashes)


@in_loop
async def test_routers_know_a_real_node_from_its_first_life_to_its_next(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, (one, two) = f"told-{uuid4().hex[:8]}", (chain(1, 20), chain(2, 30))
    disk = ("--disk", str(tmp_path / "disk"), "--disk-size", "64MiB")
    address = host_pool_address(name)
    with pool_worker(address) as worker, node_at(tmp_path, name, port, *disk) as node:
        async with router(node.grpc_address) as early, router() as late:
            await stored(worker, one)
            await until(lambda: early.knows(one), "it hears of what is stored")
            (told,) = early.directory.pool_nodes.values()
            assert told.workers == (worker.links._hello.incarnation,)
            late.nodes.add(node.grpc_address)
            await until(lambda: late.knows(one), "who joins late hears of all there is")
            await stored(worker, two)
            await until(lambda: early.knows(two) and late.knows(two), "both go on")
            await until(
                lambda: len(known(early.directory)[told.node].get(Tier.DISK, ())) == 50,
                "it is on disk",
            )
            await until(lambda: known(early.directory) == known(late.directory), "both know all")
            node.kill()
            await until(lambda: not (early.blocks or late.blocks), "all is forgotten")
            with node_at(tmp_path, name, port, *disk) as again:
                assert again.grpc_address == node.grpc_address
                await asyncio.to_thread(worker.await_connected, False)
                await asyncio.to_thread(worker.await_connected)
                await until(
                    lambda: early.knows(two) and late.knows(two), "the next life tells its own"
                )
                (other,) = early.directory.pool_nodes
                held = known(early.directory)
                assert other != told.node and held.keys() == {other}
                assert held[other].keys() == {Tier.DISK}, "memory is gone"


@in_loop
async def test_a_router_that_is_told_of_no_node_any_more_forgets_it(
    tmp_path: Path, port: int
) -> None:
    name, hashes = f"left-{uuid4().hex[:8]}", chain(1, 9)
    with node_at(tmp_path, name, port) as node, pool_worker(host_pool_address(name)) as worker:
        async with router(node.grpc_address) as one:
            await stored(worker, hashes)
            await until(lambda: one.knows(hashes), "it hears of what is stored")
            await one.nodes.remove(node.grpc_address)
            assert one.blocks == 0
            node.signal(signal.SIGTERM)


# --- the service alone, over a real core ---------------------------------------------------------


def name_of(number: int) -> BlockHash:
    return BlockHash(blake2b(number.to_bytes(8, "big"), digest_size=HASH_BYTES).digest())


class Served:
    """A PoolNodeService over `Changes` and a tier, without workers and memory."""

    def __init__(self) -> None:
        self.blocks = TierBlocks(200_000, open_policy("lru"))
        self.changes = Changes(host=self.blocks, disk=TierBlocks(0, open_policy("lru")))
        self.incarnation = Incarnation(uuid4().hex)
        self.lines: dict[RouterCall, RouterLine] = {}
        self.drops: list[str] = []
        self.skips = False

    def post(self, event: Any) -> None:
        match event:
            case LineOpened(line=line):
                self.lines[line.call] = line
                self.changes.called(line.call)
            case RouterTook(router=call):
                self.changes.took(call)
            case RouterHungUp(router=call):
                del self.lines[call]
                self.changes.hung_up(call)
        self.flush()

    def store(self, numbers: range, length: int = 10) -> None:
        """Chains of so many blocks."""
        for first in numbers[::length]:
            part = range(first, min(first + length, numbers.stop))
            places = self.blocks.reserve(len(part), below=())
            chain = NewChain(
                parent=None,
                hashes=BlockHashes.of(map(name_of, part)),
                places=array("i", places),
            )
            self.blocks.adopt(chain, 0.0)
        self.flush()

    def flush(self) -> None:
        for command in self.changes.flush():
            match command:
                case TellRouter(router=call):
                    if not self.skips:
                        self.lines[call].tell(self._update(command))
                    else:
                        self.skips = False
                        self.changes.took(call)
                case DropRouter(router=call, reason=reason):
                    self.drops.append(reason)
                    self.lines[call].drop(reason)

    def _update(self, command: TellRouter) -> PoolUpdate:
        return PoolUpdate(sequence=command.sequence, node=self.incarnation, blocks=command.blocks)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Served, str]]:
    served, server = Served(), grpc_server(ACCESS)
    pool_node_pb2_grpc.add_PoolNodeServicer_to_server(PoolNodeService(served.post), server)
    port = bind_port(server, "127.0.0.1", None, ACCESS)
    await server.start()
    try:
        yield served, f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


def stored_blocks(update: PoolUpdate) -> int:
    return sum(len(run.hashes) // HASH_BYTES for told in update.blocks for run in told.stored)


@in_loop
async def test_a_large_tier_comes_page_by_page() -> None:
    async with serving() as (served, address):
        served.store(range(100_000))
        async with router(address) as one:
            await until(lambda: one.blocks == 100_000, "it knows all")
            served.store(range(100_000, 100_010))
            await until(lambda: one.blocks == 100_010, "and what is new")
            sizes = [stored_blocks(update) for update in one.updates]
            assert max(sizes) == changes.PAGE_BLOCKS
            assert [update.sequence for update in one.updates] == [*range(len(sizes))]


async def _end_of(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


@in_loop
async def test_a_router_that_does_not_read_is_dropped_and_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing but what is on its way is kept for it then."""
    monkeypatch.setattr(changes, "MOST_WAITING", 1 << 15)
    async with serving() as (served, address), router(address) as reads:
        options = [("grpc.http2.bdp_probe", 0)]  # little is on its way
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            stub = pool_node_pb2_grpc.PoolNodeStub(channel)
            asked = pb.WatchRequest(wire_version=WIRE_VERSION)
            slow = aiter(stub.Watch(asked, metadata=ACCESS.metadata))
            assert (await anext(slow)).sequence == 0
            step = 4096
            for count in range(2 * changes.MOST_WAITING // step):
                served.store(range(count * step, (count + 1) * step), length=1)
                await until(lambda n=count: reads.blocks == (n + 1) * step, "the other reads on")  # type: ignore[misc]
                if served.drops:
                    break
            assert len(served.drops) == 1
            assert count * step > changes.MOST_WAITING / 2
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _end_of(slow)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "strands wait for it" in str(caught.value.details())
        await until(lambda: len(served.lines) == 1, "its line is closed")
        async with router(address) as again:
            await until(lambda: known(again.directory) == known(reads.directory), "it begins anew")
        assert reads.lost == 0


@in_loop
async def test_a_router_that_misses_an_update_begins_anew() -> None:
    async with serving() as (served, address), router(address) as one:
        served.store(range(10))
        await until(lambda: one.blocks == 10, "it knows all")
        served.skips = True
        served.store(range(10, 20))
        served.store(range(20, 30))
        await until(lambda: one.lost == 1, "it notices")
        await until(lambda: one.blocks == 30, "it begins anew")


@in_loop
async def test_a_router_of_another_version_is_told_so() -> None:
    async with serving() as (served, address), grpc.aio.insecure_channel(address) as channel:
        stub = pool_node_pb2_grpc.PoolNodeStub(channel)
        asked = pb.WatchRequest(wire_version=WIRE_VERSION + 1)
        with pytest.raises(grpc.aio.AioRpcError, match="install the same kvrelay on both"):
            await stub.Watch(asked, metadata=ACCESS.metadata).read()
        assert not served.lines
