"""A worker's fetches from pool nodes, step by step: exact commands, and each ends once."""

from __future__ import annotations

import pytest

from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.client_events import (
    OWN_NODE,
    BlocksFetched,
    CloseNode,
    ConnectNode,
    FetchBlocks,
    FromNode,
    NodeEvent,
    NodeOrder,
    OfferBlocks,
    OfferedBlock,
    PoolLost,
    SendPool,
)
from kvpool.core.fetch.cost import RestoreCost
from kvpool.core.fetch.fetches import Restored
from kvpool.core.fetch.pool_nodes import LEFT_ALONE_S, PING
from kvpool.core.fetch.prefix_lookup import PoolUse, PrefixLookup
from kvpool.core.layout.hashes import BlockHashes
from kvpool.core.layout.layout import BlockId, KvLayout, LayerGroup, Plane
from kvpool.core.node.messages import (
    FetchDone,
    Fetched,
    FetchWanted,
    FromPool,
    LookedUp,
    LookupWanted,
    StoreWanted,
    ToPool,
)
from kvpool.core.node.tier_blocks import PoolPlace
from kvrelay.messages import PrefixSource
from kvrelay.types import Incarnation, PrefixOrigin, RequestKey
from tests.unit.naive_tree import hashes_of
from tests.unit.pool_nodes_kit import TTL_S, joined

PATIENCE_S = 5.0
NODE, OTHER = Incarnation("node"), Incarnation("other")
HASHES = BlockHashes.of(hashes_of((1, 2, 3)))
PLACES = tuple(PoolPlace(i) for i in (7, 3))
CONNECT = ConnectNode(node=NODE, addresses=("x:1",))
CLOSE = CloseNode(node=NODE)
LOST = PoolLost(node=NODE, reason="gone")
SIZE = 4


def holder(name: str = "r") -> Holder:
    return Holder("prefill", RequestKey(name, 0))


def done(number: int, *damaged: int, node: Incarnation = OWN_NODE) -> SendPool:
    message = FetchDone(request_no=number, damaged=tuple(HASHES[i] for i in damaged))
    return SendPool(node=node, message=message)


def asks(number: int, *, node: Incarnation = NODE, blocks: int = 3, skip: int = 1) -> SendPool:
    message = FetchWanted(request_no=number, hashes=tuple(HASHES[:blocks]), skip=skip)
    return SendPool(node=node, message=message)


def seeks(number: int) -> SendPool:
    return SendPool(message=LookupWanted(request_no=number, hashes=tuple(HASHES)))


PING_OWN = SendPool(message=LookupWanted(request_no=PING, hashes=()))
PONG = LookedUp(request_no=PING, host_blocks=0, disk_blocks=0)


def nothing(name: str = "r") -> list[Restored]:
    """The first block was here."""
    return [Restored(holder=holder(name), tokens=SIZE, origin=PrefixOrigin.DEVICE)]


def restored(blocks: int, origin: PrefixOrigin, name: str = "r") -> list[Restored]:
    return [Restored(holder=holder(name), tokens=SIZE * (1 + blocks), origin=origin)]


class Worker:
    """It has the first of three blocks of each prompt."""

    def __init__(self) -> None:
        planes = (Plane(name="k", heads=1, dim=2),)
        group = LayerGroup(layers=(0,), planes=planes)
        layout = KvLayout(groups=(group,), dtype="float32", block_size=SIZE)
        self.tables = BlockTables(layout, 32, caching=False)
        cost = RestoreCost(SIZE)
        self.pool = PoolUse(self.tables, cost)
        self.lookup = PrefixLookup(tables=self.tables, cost=cost, pool=self.pool)
        self.now_s = 100.0

    def begin(self, name: str = "r", node: Incarnation | None = None) -> bool:
        """`node` seems to have it all."""
        hint = None
        if node is not None:
            hint = PrefixSource(peer=node, addresses=("x:1",), blocks=3, is_pool_node=True)
        assert self.tables.try_grow(holder(name), SIZE, now_s=self.now_s)
        fetches = self.lookup.fetches.begin(holder(name), HASHES, 1, hint, self.now_s)
        self.lookup.validate()
        return fetches

    def tell(self, event: NodeEvent) -> list[Restored]:
        ended = self.lookup.on_node(event, self.now_s)
        self.lookup.validate()
        return ended

    def hear(self, message: FromPool, node: Incarnation = OWN_NODE) -> list[Restored]:
        return self.tell(FromNode(node=node, message=message))

    def tick(self, seconds: float) -> list[Restored]:
        self.now_s += seconds
        return self.lookup.expire(self.now_s)

    def orders(self) -> list[NodeOrder]:
        return self.pool.take_commands()[0]

    def sent(self) -> ToPool:
        (order,) = self.orders()
        assert isinstance(order, SendPool)
        return order.message

    def wants(self, name: str = "r") -> None:
        """All that the own node has."""
        assert self.begin(name)
        sought = self.sent()
        assert isinstance(sought, LookupWanted)
        number = sought.request_no
        assert self.hear(LookedUp(request_no=number, host_blocks=3, disk_blocks=0)) == []
        assert self.orders() == [asks(number, node=OWN_NODE)]

    def grant(self, number: int = 1, node: Incarnation = OWN_NODE) -> FetchBlocks:
        """The node has the blocks, and they are read."""
        answer = Fetched(request_no=number, places=PLACES, checksums=(8, 9))
        assert self.hear(answer, node) == []
        (order,) = self.orders()
        assert isinstance(order, FetchBlocks)
        return order

    def read(
        self,
        number: int = 1,
        sound: int = 2,
        *,
        node: Incarnation = OWN_NODE,
        damaged: bool = False,
    ) -> list[Restored]:
        event = BlocksFetched(
            node=node, request_no=number, region="region-1", sound_blocks=sound, damaged=damaged
        )
        return self.tell(event)


def with_own() -> Worker:
    worker = Worker()
    worker.tell(joined())
    return worker


# --- the node of this host ----------------------------------------------------------------------


def test_fetched() -> None:
    worker = with_own()
    assert worker.begin()
    assert worker.orders() == [seeks(1)]
    assert worker.hear(LookedUp(request_no=1, host_blocks=2, disk_blocks=1)) == []
    assert worker.orders() == [asks(1, node=OWN_NODE)]
    targets = tuple((block,) for block in worker.tables.tables(holder())[0][1:])
    assert worker.grant() == FetchBlocks(
        request_no=1, region="region-1", places=PLACES, checksums=(8, 9), targets=targets
    )
    assert worker.read() == restored(2, PrefixOrigin.DISK)
    assert worker.orders() == [done(1)]


def test_fewer_blocks_than_wanted_are_granted() -> None:
    worker = with_own()
    worker.wants()
    answer = Fetched(request_no=1, places=PLACES[:1], checksums=(8,))
    assert worker.hear(answer) == []
    (order,) = worker.orders()
    assert isinstance(order, FetchBlocks) and len(order.targets) == 1
    assert worker.read(sound=1) == restored(1, PrefixOrigin.HOST)


def test_what_is_granted_beyond_what_was_asked_for_is_left_alone() -> None:
    """A node that is wrong must not write into other requests' blocks, nor end the worker."""
    worker = with_own()
    worker.wants()
    answer = Fetched(request_no=1, places=PLACES * 3, checksums=(8, 9) * 3)
    assert worker.hear(answer) == []
    (order,) = worker.orders()
    assert isinstance(order, FetchBlocks)
    assert order.places == PLACES and len(order.targets) == len(order.checksums) == 2


def test_a_damaged_block_is_named_and_ends_the_prefix() -> None:
    worker = with_own()
    worker.wants()
    worker.grant()
    assert worker.read(sound=1, damaged=True) == restored(1, PrefixOrigin.HOST)
    assert worker.orders() == [done(1, 2)]


def test_what_was_read_too_late_says_nothing_of_the_block() -> None:
    """The place may have been another's."""
    worker = with_own()
    worker.wants()
    worker.grant()
    worker.now_s += TTL_S
    assert worker.read(sound=1, damaged=True) == nothing()
    assert worker.orders() == [done(1)]


@pytest.mark.parametrize("how", ["lost", "lost and back", "lost and another", "dropped", "late"])
def test_what_was_read_is_void_when_it_was_not_held_to_the_end(how: str) -> None:
    worker = with_own()
    worker.wants()
    worker.grant()
    match how:
        case "dropped":
            assert worker.lookup.leave(holder()), "the targets are being written"
        case "late":
            worker.now_s += TTL_S
        case _:
            assert worker.tell(PoolLost(reason="")) == nothing(), "it goes on in other blocks"
    if how == "lost and back":
        worker.tell(joined())
    elif how == "lost and another":
        worker.tell(joined(life="2"))
    assert worker.tick(PATIENCE_S) == []
    assert worker.read() == ([] if how.startswith("lost") else nothing())
    is_told = how not in ("lost", "lost and another")
    assert worker.orders() == [done(1)] * is_told
    assert not worker.lookup.is_fetching(holder())


def test_a_damaged_block_of_a_dropped_request_is_named_all_the_same() -> None:
    worker = with_own()
    worker.wants()
    worker.grant()
    assert worker.lookup.leave(holder())
    assert worker.read(sound=0, damaged=True) == nothing()
    assert worker.orders() == [done(1, 1)]


def test_no_one_waits_for_a_node_that_hangs() -> None:
    worker = with_own()
    worker.wants("first")
    assert worker.begin("second")
    worker.orders()
    assert worker.tick(PATIENCE_S) == [*nothing("first"), *nothing("second")]
    assert worker.orders() == [PING_OWN]
    late = Fetched(request_no=1, places=PLACES, checksums=(8, 9))
    assert worker.hear(late) == [] and worker.orders() == [done(1)]
    assert worker.hear(LookedUp(request_no=2, host_blocks=3, disk_blocks=0)) == []
    assert worker.hear(Fetched(request_no=2, places=(), checksums=())) == []
    assert worker.orders() == []


def test_a_node_that_hangs_leaves_the_choice_to_what_the_router_says() -> None:
    worker = with_own()
    assert worker.begin(node=NODE)
    assert worker.orders() == [seeks(1)]
    assert worker.tick(PATIENCE_S) == []
    assert worker.orders() == [PING_OWN, CONNECT]


def test_a_node_that_hangs_costs_one_request_its_patience_once() -> None:
    """Two minutes, a request every second and a tick every half; two were asked before."""
    worker = with_own()
    waited_s: dict[str, float] = {}

    def pass_half_a_second() -> None:
        for ended in worker.tick(0.5):
            name = ended.holder.key.request_id
            waited_s[name] = worker.now_s - began_s.pop(name)
            worker.tables.release(ended.holder)

    began_s: dict[str, float] = {}
    asked = 0
    for second in range(120):
        name = f"r{second}"
        if worker.begin(name):
            began_s[name] = worker.now_s
            asked += 1
        else:
            worker.tables.release(holder(name))
        for _ in range(2):
            pass_half_a_second()
    assert not began_s
    assert sorted(waited_s.values()) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert asked == 5, "those that came before the first one was given up"
    sent = [order for order in worker.orders() if order == PING_OWN]
    assert len(sent) == 1
    worker.hear(PONG)
    assert worker.begin("again")
    assert worker.orders() == [seeks(121)]


def test_what_it_says_late_is_no_answer_to_the_ping() -> None:
    worker = with_own()
    worker.wants("first")
    worker.tick(PATIENCE_S)
    worker.orders()
    worker.hear(LookedUp(request_no=1, host_blocks=3, disk_blocks=0))
    assert not worker.begin("second")
    worker.hear(PONG)
    assert worker.begin("third")


@pytest.mark.parametrize("node", [OWN_NODE, NODE])
def test_a_mute_node_that_is_lost_and_back_is_asked(node: Incarnation) -> None:
    worker = Worker()
    hint = None if node == OWN_NODE else node
    if hint is None:
        worker.tell(joined())
    assert worker.begin("first", hint)
    if hint is not None:
        worker.tell(joined(NODE))
    worker.tick(PATIENCE_S)
    assert not worker.begin("second", hint)
    worker.tell(PoolLost(node=node, reason=""))
    worker.now_s += LEFT_ALONE_S
    worker.tell(joined(node))
    assert worker.begin("third", hint)


def test_a_mute_node_of_another_host_leaves_the_others_to_be_asked() -> None:
    worker = with_own()
    for number, name in enumerate(("first", "second"), 1):
        assert worker.begin(name, NODE)
        assert worker.orders() == [seeks(number)]
        worker.hear(LookedUp(request_no=number, host_blocks=0, disk_blocks=0))
        if number == 1:
            assert worker.orders() == [CONNECT]
            worker.tell(joined(NODE))
        assert worker.orders() == [asks(number)]
    assert worker.tick(PATIENCE_S) == [*nothing("first"), *nothing("second")]
    assert worker.orders() == [SendPool(node=NODE, message=PING_OWN.message)]
    assert worker.begin("third", NODE)
    assert worker.orders() == [seeks(3)], "the node of this host answers"
    assert worker.hear(LookedUp(request_no=3, host_blocks=0, disk_blocks=0)) == nothing("third")
    worker.hear(PONG, NODE)
    assert worker.begin("fourth", NODE)
    worker.hear(LookedUp(request_no=4, host_blocks=0, disk_blocks=0))
    assert worker.orders() == [seeks(4), asks(4)]


def test_a_store_without_an_answer_makes_the_node_mute_too() -> None:
    worker = with_own()
    block = OfferedBlock(HASHES[0], None, (BlockId(0),))
    worker.pool.nodes.stores.offer(OfferBlocks(offer=1, blocks=(block,)), worker.now_s)
    assert isinstance(worker.sent(), StoreWanted)
    worker.tick(PATIENCE_S)
    assert not worker.begin("first")
    worker.hear(PONG)
    assert worker.begin("second")


def test_a_lost_node_leaves_the_choice_to_what_the_router_says() -> None:
    worker = with_own()
    worker.wants("first")
    assert worker.begin(node=NODE)
    worker.orders()
    assert worker.tell(PoolLost(reason="")) == nothing("first")
    assert worker.orders() == [CONNECT]
    worker.tell(joined(NODE))
    assert worker.orders() == [asks(2)]


def test_without_a_node_there_is_nothing_to_wait_for() -> None:
    worker = Worker()
    assert not worker.begin()
    assert worker.pool.own.sought_tokens == 2 * SIZE
    assert worker.begin("far", NODE)
    assert worker.orders() == [CONNECT]


# --- nodes of other hosts -----------------------------------------------------------------------


def test_what_is_asked_before_the_link_stands_is_asked_then() -> None:
    worker = Worker()
    assert worker.begin(node=NODE)
    assert worker.orders() == [CONNECT]
    worker.now_s += PATIENCE_S - 1
    worker.tell(joined(NODE))
    assert worker.orders() == [asks(1)]
    assert worker.tick(PATIENCE_S - 1) == [], "it has its time after that"
    worker.grant(1, NODE)
    assert worker.read(1, node=NODE) == restored(2, PrefixOrigin.REMOTE)
    assert worker.orders() == [done(1, node=NODE)]
    assert worker.begin("next", NODE)
    assert worker.orders() == [asks(2)], "the link stays"


def test_a_link_that_does_not_stand_in_time_is_not_waited_for() -> None:
    worker = Worker()
    worker.begin(node=NODE)
    worker.orders()
    assert worker.tick(0) == []
    assert worker.tick(PATIENCE_S) == nothing()
    worker.tell(joined(NODE))
    assert worker.orders() == []


def test_a_node_that_is_lost_ends_all_fetches_and_is_left_alone() -> None:
    worker = Worker()
    worker.begin("first", NODE)
    worker.begin("second", NODE)
    worker.orders()
    assert worker.tell(LOST) == [*nothing("first"), *nothing("second")]
    assert worker.orders() == [CLOSE]
    assert not worker.begin(node=NODE)
    worker.now_s += LEFT_ALONE_S
    assert worker.begin(node=NODE)
    assert worker.orders() == [CONNECT]
    worker.tell(joined(NODE))
    assert worker.orders() == [asks(4)]
    assert worker.tell(LOST) == nothing()
    assert worker.orders() == [CLOSE]


def test_a_read_from_a_node_that_is_lost_comes_to_its_end() -> None:
    worker = Worker()
    worker.begin(node=NODE)
    worker.tell(joined(NODE))
    worker.orders()
    worker.grant(1, NODE)
    assert worker.tell(LOST) == nothing(), "it goes on in other blocks"
    assert worker.orders() == [CLOSE]
    worker.tell(joined(NODE))
    assert not worker.begin("next", NODE), "nothing is known of it any more"
    assert worker.hear(Fetched(request_no=9, places=PLACES, checksums=(8, 9)), NODE) == []
    assert worker.read(1, node=NODE) == [], "what was read is of no use"
    assert worker.orders() == []


def test_a_dropped_request_ends_before_the_link_and_after_it() -> None:
    worker = Worker()
    worker.begin("early", NODE)
    assert not worker.lookup.leave(holder("early"))
    worker.begin("late", NODE)
    worker.orders()
    worker.tell(joined(NODE))
    assert worker.orders() == [asks(2)]
    assert not worker.lookup.leave(holder("late"))
    answer = Fetched(request_no=2, places=PLACES, checksums=(8, 9))
    assert worker.hear(answer, NODE) == [] and worker.orders() == [done(2, node=NODE)]


def test_the_node_of_this_host_and_another_are_kept_apart() -> None:
    worker = with_own()
    worker.wants("own")
    worker.begin(node=NODE)
    worker.hear(LookedUp(request_no=2, host_blocks=0, disk_blocks=0))
    worker.tell(joined(NODE))
    assert worker.orders()[1:] == [CONNECT, asks(2)]
    stray = Fetched(request_no=2, places=PLACES, checksums=(8, 9))
    assert worker.hear(stray) == [] and worker.orders() == [done(2)], "not its own to answer"
    worker.grant(2, NODE)
    assert worker.tell(PoolLost(reason="")) == nothing("own")
    assert worker.read(2, node=NODE) == restored(2, PrefixOrigin.REMOTE)
    worker.orders()
    worker.begin("x", OTHER)
    assert worker.orders() == [ConnectNode(node=OTHER, addresses=("x:1",))]


def test_only_the_node_of_this_host_says_what_is_there() -> None:
    worker = with_own()
    worker.begin("far", NODE)
    worker.hear(LookedUp(request_no=1, host_blocks=0, disk_blocks=0))
    worker.tell(joined(NODE))
    worker.begin()
    worker.orders()
    stray = LookedUp(request_no=2, host_blocks=3, disk_blocks=0)
    assert worker.hear(stray, NODE) == [] and worker.orders() == []


def test_no_second_link_is_made_to_the_node_of_its_own_host() -> None:
    """A router named it, which doesn't know yet whose host it is on."""
    worker = with_own()
    assert worker.begin(node=joined().welcome.incarnation)
    assert worker.hear(LookedUp(request_no=1, host_blocks=2, disk_blocks=0)) == []
    assert worker.orders() == [seeks(1), asks(1, node=OWN_NODE, blocks=2)]


def test_a_link_that_it_has_to_the_node_already_is_used_to_its_end() -> None:
    worker = Worker()
    own = joined().welcome.incarnation
    assert worker.begin(node=own)
    worker.tell(joined(own))
    worker.orders()
    worker.tell(joined())
    worker.grant(1, own)
    assert worker.read(1, node=own) == restored(2, PrefixOrigin.REMOTE)
