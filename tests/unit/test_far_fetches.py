"""Prefixes fetched from another host's pool node: chosen by cost, each begin ends once."""

from __future__ import annotations

import pytest

from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.client_events import (
    OWN_NODE,
    CloseNode,
    ConnectNode,
    PoolJoined,
    PoolLost,
    SendPool,
)
from kvpool.core.fetch.cost import RestoreCost
from kvpool.core.fetch.fetches import Restored
from kvpool.core.fetch.prefix_lookup import PoolUse, PrefixLookup
from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane
from kvpool.core.node.messages import FetchDone, FetchWanted
from kvrelay.messages import PrefixSource
from kvrelay.types import Incarnation, PrefixOrigin, RequestKey
from tests.unit.pool_nodes_kit import PlayedNodes, joined

SIZE = 4
NODE = Incarnation("node")
A = Holder("prefill", RequestKey("a", 0))
B = Holder("prefill", RequestKey("b", 0))
PROMPT = list(range(20))


class Scene:
    """A worker whose host's pool has nothing unless it is told."""

    def __init__(self) -> None:
        planes = (Plane(name="k", heads=1, dim=2),)
        group = LayerGroup(layers=(0,), planes=planes)
        layout = KvLayout(groups=(group,), dtype="float32", block_size=SIZE)
        self.tables = BlockTables(layout, 16)
        self.tables.device.reports = True
        self.cost = RestoreCost(SIZE)
        self.pool = PoolUse(self.tables, self.cost)
        self.lookup = PrefixLookup(tables=self.tables, cost=self.cost, pool=self.pool)
        self.nodes = PlayedNodes(self.lookup)
        names = self.tables.chain("", len(PROMPT))
        names.extend(PROMPT, len(PROMPT))
        self.hashes = names.full(len(PROMPT) - 1).hashes()

    def open(self, holder: Holder, blocks: int) -> None:
        """NODE seems to have so much; the host's pool is asked first."""
        source = PrefixSource(peer=NODE, addresses=("x:1",), blocks=blocks, is_pool_node=True)
        found = self.lookup.try_open(
            holder, 20, hashes=self.hashes, ahead_tokens=SIZE, now_s=0, hint=source
        )
        assert found is not None and self.lookup.is_fetching(holder)
        assert self.nodes.sought().hashes == tuple(self.hashes)

    def asked(self) -> FetchWanted:
        node, wanted = self.nodes.wanted()
        assert node == NODE
        return wanted

    def timed(self, token_s: float, far_s: float) -> None:
        self.cost.computed(1, token_s)
        for _ in range(2):  # the first waits for the link
            self.cost.fetched(NODE, 1, far_s)


def test_what_the_far_node_has_is_fetched_named_and_offered_to_the_own_pool() -> None:
    scene = Scene()
    scene.open(A, 3)
    assert scene.nodes.found(0) == []
    asked = scene.asked()
    assert scene.nodes.connected == ConnectNode(node=NODE, addresses=("x:1",))
    assert asked.hashes == tuple(scene.hashes[:3])
    scene.nodes.granted(3)
    targets = scene.nodes.copies().targets
    assert [place[0] for place in targets] == list(scene.tables.tables(A)[0][:3])
    assert scene.lookup.is_fetching(A)
    done = scene.nodes.copied(3)
    assert done == [Restored(holder=A, tokens=12, origin=PrefixOrigin.REMOTE)]
    assert not scene.lookup.is_fetching(A)
    assert scene.pool.remote.tokens == 12 and scene.lookup.origins[PrefixOrigin.REMOTE] == 1
    offered = scene.pool.write_behind.offer(3.0)
    assert offered is not None
    assert [block.hash for block in offered.blocks] == [*scene.hashes[:3]]


def test_what_the_worker_has_itself_is_not_fetched() -> None:
    scene = Scene()
    assert scene.tables.try_grow(B, 8, now_s=0)
    scene.tables.fill(B, scene.hashes[:2])
    scene.open(A, 4)
    assert scene.nodes.found(0) == []
    question = scene.asked()
    assert (question.skip, len(question.hashes)) == (2, 4)
    done = scene.nodes.fetched(1)
    assert done == [Restored(holder=A, tokens=12, origin=PrefixOrigin.REMOTE)]
    assert scene.pool.remote.tokens == 4


def test_what_it_has_not_any_more_is_computed() -> None:
    scene = Scene()
    scene.open(A, 3)
    scene.nodes.found(0)
    scene.asked()
    assert scene.nodes.fetched(0) == [Restored.found_here(A, 0)]
    assert scene.cost.remote(NODE).seconds is None


@pytest.mark.parametrize(("far", "near", "chosen"), [(4, 1, "far"), (4, 4, "near"), (2, 3, "near")])
def test_untimed_the_one_with_more_is_asked(far: int, near: int, chosen: str) -> None:
    scene = Scene()
    scene.open(A, far)
    assert scene.nodes.found(near) == []
    node, _ = scene.nodes.wanted()
    assert node == (NODE if chosen == "far" else OWN_NODE)


def test_slower_than_computing_is_declined_and_counted() -> None:
    scene = Scene()
    scene.timed(token_s=1.0, far_s=5.0)
    scene.open(A, 3)
    assert scene.nodes.found(0) == [Restored.found_here(A, 0)]
    assert scene.pool.declined_tokens == 12
    scene.cost.remote(NODE).seconds = 3.0
    scene.open(B, 3)
    assert scene.nodes.found(0) == []
    scene.asked()


def test_the_first_fetch_waits_for_the_link_and_is_not_timed() -> None:
    cost = RestoreCost(SIZE)
    cost.fetched(NODE, 2, 100.0)
    assert cost.remote(NODE).seconds is None
    cost.fetched(NODE, 2, 1.0)
    assert cost.remote(NODE).seconds == 0.5


def test_a_dropped_request_keeps_its_blocks_until_the_copy_has_ended() -> None:
    scene = Scene()
    scene.open(A, 3)
    scene.nodes.found(0)
    scene.asked()
    scene.nodes.granted(3)
    scene.nodes.copies()
    assert scene.lookup.leave(A)
    assert scene.lookup.is_fetching(A) and scene.nodes.orders() == []
    assert scene.nodes.copied(3) == [Restored.found_here(A, 0)]
    scene.tables.release(A)
    scene.tables.validate()


def test_what_is_granted_to_a_dropped_request_is_given_back() -> None:
    scene = Scene()
    scene.open(A, 3)
    scene.nodes.found(0)
    number = scene.asked().request_no
    assert not scene.lookup.leave(A)
    scene.tables.release(A)
    assert scene.nodes.granted(3) == []
    assert scene.nodes.orders() == [SendPool(node=NODE, message=FetchDone(request_no=number))]


def test_a_node_that_can_not_be_asked_leaves_the_choice_to_the_own_pool() -> None:
    """It was lost, or it is this host's own, and a router did not know that."""
    for lost in (True, False):
        scene = Scene()
        if lost:
            scene.open(B, 3)
            scene.nodes.found(0)
            scene.asked()
            assert scene.nodes.tell(PoolLost(node=NODE, reason="")) == [Restored.found_here(B, 0)]
            assert scene.nodes.orders() == [CloseNode(node=NODE)]
        else:
            scene.nodes.tell(PoolJoined(welcome=joined(NODE).welcome))
        scene.open(A, 3)
        assert scene.nodes.found(1) == []
        node, wanted = scene.nodes.wanted()
        assert (node, len(wanted.hashes)) == (OWN_NODE, 1)


# --- a slow time is not the last word -----------------------------------------------------------


@pytest.mark.parametrize("way", ["host", "disk", "remote", "peer"])
def test_what_was_slow_is_tried_again_at_a_bounded_cost(way: str) -> None:
    """Ten times slower than computing, as timed: of 10,000 blocks trials lose at most 2 %."""
    cost = RestoreCost(SIZE)
    cost.computed(1, 1.0)
    rates = {"host": cost.host, "disk": cost.disk, "peer": cost.peer, "remote": cost.remote(NODE)}
    rate = rates[way]
    rate.seconds = slow_s = 10.0 * SIZE

    def tries() -> bool:
        if way == "host":
            return cost.fetches(1, 0) == 1
        if way == "disk":
            return cost.fetches(0, 1) == 1
        return cost.tries_again(rate, 1)

    trials = sum(tries() for _ in range(10_000))
    lost_s = trials * (slow_s - SIZE)
    assert 0 < lost_s <= 0.02 * 10_000 * SIZE
    while not tries():
        pass
    for _ in range(20):
        rate.observe(1, 0.5 * SIZE)
    assert cost.prefers(rate, 1, 0, 0)


def test_what_is_faster_elsewhere_is_not_tried() -> None:
    """A way that beats computing but not the host's pool has no need of trials."""
    cost = RestoreCost(SIZE)
    cost.computed(1, 1.0)
    cost.peer.seconds = 2.0
    assert not any(cost.tries_again(cost.peer, 1) for _ in range(1000))
    assert not cost.tries_again(cost.remote(NODE), 1), "untimed, and preferred by that alone"
