"""A worker's clients of pool nodes of other hosts: every question ends once, whatever they do."""

from __future__ import annotations

from kvpool.core.fetch.client_events import (
    BlocksFetched,
    ClientCommand,
    CloseNode,
    ConnectNode,
    DropPrefix,
    FetchBlocks,
    FromNode,
    NodeEvent,
    PoolJoined,
    PoolLost,
    PoolQuestion,
    PrefixFetched,
    SeekPrefix,
    SendPool,
    WantPrefix,
)
from kvpool.core.fetch.pool_nodes import LEFT_ALONE_S, PATIENCE_S, PoolNodes
from kvpool.core.layout.hashes import BlockHashes
from kvpool.core.layout.layout import BlockId
from kvpool.core.node.messages import FetchDone, Fetched, FetchWanted, LookupWanted, PoolWelcome
from kvpool.core.node.tier_blocks import PoolPlace
from kvrelay.types import Incarnation, RequestKey
from tests.unit.naive_tree import hashes_of

NODE, OTHER = Incarnation("node"), Incarnation("other")
HASHES = BlockHashes.of(hashes_of((1, 2)))
TARGETS = ((BlockId(0),), (BlockId(1),))
PLACES = (PoolPlace(0), PoolPlace(1))
CONNECT = ConnectNode(node=NODE, addresses=("x:1",))
CLOSE = CloseNode(node=NODE)
LOST = PoolLost(node=NODE, reason="gone")


def want(name: str = "r", node: Incarnation = NODE) -> WantPrefix:
    return WantPrefix(
        key=RequestKey(name, 0), hashes=HASHES, targets=TARGETS, node=node, addresses=("x:1",)
    )


def drop(name: str = "r") -> DropPrefix:
    return DropPrefix(key=RequestKey(name, 0), node=NODE)


def fetched(blocks: int, name: str = "r") -> PrefixFetched:
    return PrefixFetched(key=RequestKey(name, 0), blocks=blocks)


def joined(node: Incarnation = NODE) -> PoolJoined:
    welcome = PoolWelcome(wire_version=1, incarnation=node, region="r", lease_ttl_s=30.0)
    return PoolJoined(node=node, welcome=welcome)


def asks(request_no: int) -> SendPool:
    message = FetchWanted(request_no=request_no, hashes=tuple(HASHES), skip=0)
    return SendPool(node=NODE, message=message)


def read(request_no: int, sound: int) -> BlocksFetched:
    return BlocksFetched(node=NODE, request_no=request_no, region="r", sound_blocks=sound)


class Worker:
    def __init__(self) -> None:
        self.nodes, self.now_s = PoolNodes(), 100.0

    def ask(self, question: PoolQuestion) -> list[ClientCommand]:
        commands = self.nodes.ask(question, self.now_s)
        self.nodes.validate()
        return commands

    def hear(self, event: NodeEvent) -> list[ClientCommand]:
        commands = self.nodes.handle(event, self.now_s)
        self.nodes.validate()
        return commands

    def grant(self, request_no: int) -> None:
        """The node has the blocks, and they are read."""
        answer = Fetched(request_no=request_no, places=PLACES, checksums=(1, 2))
        (order,) = self.hear(FromNode(node=NODE, message=answer))
        assert isinstance(order, FetchBlocks)
        assert (order.node, order.targets) == (NODE, TARGETS)


def test_what_is_asked_before_the_link_stands_is_asked_then() -> None:
    worker = Worker()
    assert worker.ask(want()) == [CONNECT]
    assert worker.hear(joined()) == [asks(1)]
    worker.grant(1)
    done = SendPool(node=NODE, message=FetchDone(request_no=1))
    assert worker.hear(read(1, 2)) == [done, fetched(2)]
    assert worker.ask(want("next")) == [asks(2)], "the link stays"


def test_a_link_that_does_not_stand_in_time_is_not_waited_for() -> None:
    worker = Worker()
    worker.ask(want())
    assert worker.nodes.tick(worker.now_s) == []
    worker.now_s += PATIENCE_S
    assert worker.nodes.tick(worker.now_s) == [fetched(0)]
    assert worker.hear(joined()) == []


def test_a_node_that_is_lost_ends_all_questions_and_is_left_alone() -> None:
    worker = Worker()
    worker.ask(want("first"))
    worker.ask(want("second"))
    assert worker.hear(LOST) == [CLOSE, fetched(0, "first"), fetched(0, "second")]
    assert worker.ask(want()) == [fetched(0)]
    worker.now_s += LEFT_ALONE_S
    assert worker.ask(want()) == [CONNECT]
    assert worker.hear(joined()) == [asks(1)]
    assert worker.hear(LOST) == [fetched(0), CLOSE]


def test_a_read_from_a_node_that_is_lost_comes_to_its_end() -> None:
    worker = Worker()
    worker.ask(want())
    worker.hear(joined())
    worker.grant(1)
    assert worker.hear(LOST) == [CLOSE]
    worker.now_s += LEFT_ALONE_S
    assert worker.ask(want("next")) == [fetched(0, "next")], "the read still runs"
    assert worker.hear(read(1, 2)) == [fetched(0)], "what was read is of no use"
    assert worker.hear(joined()) == [], "nothing is known of it any more"
    assert worker.ask(want()) == [CONNECT]


def test_a_dropped_request_ends_before_the_link_and_after_it() -> None:
    worker = Worker()
    worker.ask(want("early"))
    assert worker.ask(drop("early")) == [fetched(0, "early")]
    worker.ask(want("late"))
    worker.hear(joined())
    assert worker.ask(drop("late")) == [fetched(0, "late")]
    assert worker.ask(drop("late")) == []


def test_the_node_of_this_host_and_another_are_kept_apart() -> None:
    """Both count their requests from 1."""
    worker = Worker()
    worker.hear(joined(Incarnation("")))
    worker.ask(want())
    worker.hear(joined())
    key = RequestKey("own", 0)
    lookup = LookupWanted(request_no=1, hashes=tuple(HASHES))
    assert worker.ask(SeekPrefix(key=key, hashes=HASHES)) == [SendPool(message=lookup)]
    worker.grant(1)
    assert worker.hear(PoolLost(reason="")) != [], "the own node's question ends"
    assert worker.hear(read(1, 2))[-1] == fetched(2), "the read from the other goes on"
    assert worker.ask(want("x", OTHER)) == [ConnectNode(node=OTHER, addresses=("x:1",))]
