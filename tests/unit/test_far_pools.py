"""A worker's links to pool nodes of other hosts: every question ends once, whatever they do."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from cluster.worker.pool import side
from cluster.worker.pool.side import FromRemote, RemotePoolLink, RemotePools
from kvpool.core.fetch.client_events import (
    BlocksFetched,
    DropPrefix,
    FetchBlocks,
    FromNode,
    PoolJoined,
    PoolLost,
    PrefixFetched,
    WantPrefix,
)
from kvpool.core.fetch.pool_fetch import AskRemote
from kvpool.core.layout.hashes import BlockHash
from kvpool.core.layout.layout import BlockId
from kvpool.core.node.messages import FetchDone, Fetched, FetchWanted, PoolWelcome, ToPool
from kvpool.core.node.tier_blocks import PoolPlace
from kvrelay.types import Incarnation, RequestKey

NODE = Incarnation("node")
HASHES = (BlockHash(b"a" * 32), BlockHash(b"b" * 32))


@dataclass
class Clock:
    now_s: float = 100.0

    def monotonic(self) -> float:
        return self.now_s


@dataclass
class Net:
    connected: list[tuple[Incarnation, tuple[str, ...]]] = field(default_factory=list)
    sent: list[ToPool] = field(default_factory=list)
    fetched: list[FetchBlocks] = field(default_factory=list)
    closed: int = 0

    def connect(self, node: Incarnation, addresses: tuple[str, ...]) -> RemotePoolLink:
        self.connected.append((node, addresses))
        return RemotePoolLink(send=self.sent.append, fetch=self.fetched.append, close=self.close)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(side, "time", clock)
    return clock


def want(name: str = "r") -> AskRemote:
    targets = ((BlockId(0),), (BlockId(1),))
    wanted = WantPrefix(key=RequestKey(name, 0), hashes=HASHES, targets=targets)
    return AskRemote(node=NODE, addresses=("x:1",), question=wanted)


def drop(name: str = "r") -> AskRemote:
    dropped = DropPrefix(key=RequestKey(name, 0))
    return AskRemote(node=NODE, addresses=("x:1",), question=dropped)


def fetched(blocks: int, name: str = "r") -> PrefixFetched:
    return PrefixFetched(key=RequestKey(name, 0), blocks=blocks)


def joined() -> FromRemote:
    welcome = PoolWelcome(wire_version=1, incarnation=NODE, region="r", lease_ttl_s=30.0)
    return FromRemote(NODE, PoolJoined(welcome=welcome))


LOST = FromRemote(NODE, PoolLost(reason="gone"))


def reading(net: Net, far: RemotePools) -> None:
    """The node has answered the last question, and its blocks are being read."""
    (asked,) = [m for m in net.sent if isinstance(m, FetchWanted)][-1:]
    places = (PoolPlace(0), PoolPlace(1))
    answer = Fetched(request_no=asked.request_no, places=places, checksums=(1, 2))
    assert far.heard(FromRemote(NODE, FromNode(message=answer))) == []


def read(net: Net, sound: int) -> FromRemote:
    number = net.fetched[-1].request_no
    return FromRemote(NODE, BlocksFetched(request_no=number, region="r", sound_blocks=sound))


def test_what_is_asked_before_the_link_stands_is_asked_then(clock: Clock) -> None:
    net = Net()
    far = RemotePools(net.connect)
    assert far.ask(want()) == [] == net.sent
    assert net.connected == [(NODE, ("x:1",))]
    assert far.heard(joined()) == []
    reading(net, far)
    assert net.fetched[0].targets == ((BlockId(0),), (BlockId(1),))
    assert far.heard(read(net, 2)) == [fetched(2)]
    assert isinstance(net.sent[-1], FetchDone)
    far.ask(want("next"))
    assert len(net.connected) == 1, "the link stays"
    far.close()
    assert net.closed == 1


def test_a_link_that_does_not_stand_in_time_is_not_waited_for(clock: Clock) -> None:
    net = Net()
    far = RemotePools(net.connect)
    far.ask(want())
    assert far.tick() == []
    clock.now_s += side.PATIENCE_S
    assert far.tick() == [fetched(0)]
    assert far.heard(joined()) == [] and net.sent == []


def test_a_node_that_is_lost_ends_all_questions_and_is_left_alone(clock: Clock) -> None:
    net = Net()
    far = RemotePools(net.connect)
    far.ask(want("first"))
    far.ask(want("second"))
    assert far.heard(LOST) == [fetched(0, "first"), fetched(0, "second")]
    assert net.closed == 1
    assert far.ask(want()) == [fetched(0)] and len(net.connected) == 1
    clock.now_s += side.LEFT_ALONE_S
    assert far.ask(want()) == [] and len(net.connected) == 2
    far.heard(joined())
    assert far.heard(LOST) == [fetched(0)]


def test_a_read_from_a_node_that_is_lost_comes_to_its_end(clock: Clock) -> None:
    net = Net()
    far = RemotePools(net.connect)
    far.ask(want())
    far.heard(joined())
    reading(net, far)
    assert far.heard(LOST) == []
    assert far.heard(read(net, 2)) == [fetched(0)], "what was read is of no use"
    assert far.heard(joined()) == [], "nothing is known of it any more"


def test_a_dropped_request_ends_before_the_link_and_after_it(clock: Clock) -> None:
    net = Net()
    far = RemotePools(net.connect)
    far.ask(want("early"))
    assert far.ask(drop("early")) == [fetched(0, "early")]
    far.ask(want("late"))
    far.heard(joined())
    assert far.ask(drop("late")) == [fetched(0, "late")]
    assert far.ask(drop("late")) == []
