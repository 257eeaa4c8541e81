"""Prefixes fetched from a pool: chosen by cost, each begin ends once, blocks held meanwhile."""

from __future__ import annotations

import pytest

from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.pool import BlockState
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.client_events import OWN_NODE
from kvpool.core.fetch.cost import RestoreCost
from kvpool.core.fetch.fetches import Restored
from kvpool.core.fetch.prefix_lookup import PoolUse, PrefixLookup
from kvpool.core.fetch.write_behind import OFFER_AFTER_S, OFFER_BLOCKS, WriteBehind
from kvpool.core.layout.block_names import HashChain
from kvpool.core.layout.layout import NO_BLOCK, KvLayout, LayerGroup, Plane
from kvpool.core.node.messages import FetchWanted
from kvrelay.types import PrefixOrigin, RequestKey
from tests.unit.pool_nodes_kit import PlayedNodes

SIZE = 4
A = Holder("prefill", RequestKey("a", 0))
B = Holder("prefill", RequestKey("b", 0))
PROMPT = list(range(20))


def _tables(*windows: int | None, blocks: int = 16) -> BlockTables:
    planes = (Plane(name="k", heads=1, dim=2),)
    groups = tuple(
        LayerGroup(layers=(i,), planes=planes, window=window) for i, window in enumerate(windows)
    )
    return BlockTables(KvLayout(groups=groups, dtype="float32", block_size=SIZE), blocks)


def _names(tables: BlockTables, tokens: list[int] = PROMPT) -> HashChain:
    names = tables.chain("", len(tokens))
    names.extend(tokens, len(tokens))
    return names


class Scene:
    """A worker whose host has a pool."""

    def __init__(self, *windows: int | None, blocks: int = 16) -> None:
        self.tables = _tables(*windows, blocks=blocks)
        self.cost = RestoreCost(SIZE)
        self.pool = PoolUse(self.tables, self.cost)
        self.lookup = PrefixLookup(tables=self.tables, cost=self.cost, pool=self.pool)
        self.nodes = PlayedNodes(self.lookup)
        self.names = _names(self.tables)

    def open(self, found: int = 0) -> None:
        names = self.names.full(19)
        assert self.lookup.try_open(A, 20, hashes=names, ahead_tokens=SIZE, now_s=0) == found
        assert self.lookup.is_fetching(A)
        assert self.nodes.sought().hashes == tuple(names.hashes())

    def found(self, host: int, disk: int = 0) -> list[Restored]:
        return self.nodes.found(host, disk)

    def wanted(self, host: int, disk: int = 0) -> FetchWanted:
        assert self.found(host, disk) == []
        node, wanted = self.nodes.wanted()
        assert node == OWN_NODE
        return wanted

    def fetched(self, blocks: int) -> list[Restored]:
        return self.nodes.fetched(blocks)


def test_what_is_there_is_fetched_and_named() -> None:
    scene = Scene(None)
    scene.open()
    want = scene.wanted(2, 1)
    assert want.hashes == tuple(scene.names.full(12).hashes())
    assert scene.nodes.granted(3) == []
    targets = scene.nodes.copies().targets
    assert [place[0] for place in targets] == list(scene.tables.tables(A)[0][:3])
    assert scene.lookup.is_fetching(A)
    restored = Restored(holder=A, tokens=12, origin=PrefixOrigin.DISK)
    assert scene.nodes.copied(3) == [restored]
    assert not scene.lookup.is_fetching(A)
    assert scene.found(3) == scene.nodes.granted(3) == [], "it ends once"
    assert (scene.pool.own.host_tokens, scene.pool.own.disk_tokens) == (8, 4)
    assert scene.tables.try_open(B, 20, hashes=scene.names.full(19).hashes(), now_s=2) == 12
    scene.tables.validate()


def test_what_the_worker_has_is_not_fetched() -> None:
    scene = Scene(None)
    assert scene.tables.try_grow(B, 8, now_s=0)
    scene.tables.fill(B, scene.names.full(8).hashes())
    scene.open(found=8)
    want = scene.wanted(4)
    assert (want.skip, len(want.hashes)) == (2, 4)
    scene.nodes.granted(2)
    assert scene.nodes.copies().targets == tuple((b,) for b in scene.tables.tables(A)[0][2:4])


def test_nothing_more_there_ends_at_once() -> None:
    scene = Scene(None)
    scene.open()
    assert scene.found(0) == [Restored.found_here(A, 0)]


def test_a_fetch_that_ends_early_leaves_what_was_fetched() -> None:
    scene = Scene(None)
    scene.open()
    scene.wanted(4)
    assert scene.fetched(1) == [Restored(holder=A, tokens=4, origin=PrefixOrigin.HOST)]
    assert scene.cost.host.seconds is None, "a broken fetch says nothing about its speed"


def test_a_dropped_request_fetches_no_more_and_still_ends() -> None:
    scene = Scene(None)
    scene.open()
    assert not scene.lookup.leave(A), "nothing is written into its blocks"
    assert not scene.lookup.is_fetching(A)
    assert scene.found(4) == scene.nodes.orders() == []


def test_a_window_has_room_for_all_that_is_fetched() -> None:
    scene = Scene(None, 5)
    scene.open()
    scene.wanted(4)
    scene.nodes.granted(4)
    assert all(NO_BLOCK not in place for place in scene.nodes.copies().targets)
    assert scene.nodes.copied(4) != []
    scene.tables.trim(A, 16)
    assert scene.tables.device.counts(1)[BlockState.ACTIVE] == 1
    scene.tables.validate()


def test_without_room_it_is_computed() -> None:
    scene = Scene(None, 5, blocks=5)
    scene.open()
    scene.tables.device.take(1, 2, leased=False)
    assert scene.found(4) == [Restored.found_here(A, 0)]


@pytest.mark.parametrize(
    ("host_s", "disk_s", "worth"), [(0.1, 0.1, 5), (0.1, 9.0, 3), (9.0, 9.0, 0), (9.0, 0.1, 0)]
)
def test_the_faster_way_is_chosen(host_s: float, disk_s: float, worth: int) -> None:
    """A block's prefill takes one second."""
    cost = RestoreCost(SIZE)
    assert cost.worth(3, 2) == 5, "unknown: tried"
    cost.computed(8, 2.0)
    cost.restored(10, 0, 10 * host_s)
    cost.restored(10, 10, 10 * (host_s + disk_s))
    assert cost.worth(3, 2) == worth


def test_an_offer_keeps_its_blocks_until_it_is_settled() -> None:
    tables = _tables(None, blocks=4)
    tables.device.reports = True
    behind, names = WriteBehind(tables), _names(tables)
    assert tables.try_grow(A, 12, now_s=0)
    tables.fill(A, names.full(12).hashes())
    offer = behind.offer(1.0)
    assert offer is not None
    assert [block.hash for block in offer.blocks] == list(names.full(12).hashes())
    assert [block.parent for block in offer.blocks] == [None, *names.full(8).hashes()]
    assert behind.offer(1.0) is None
    tables.release(A)
    tables.validate()
    assert not tables.try_grow(B, 8, now_s=0)
    behind.settled(offer.offer)
    tables.validate()
    assert tables.try_grow(B, 16, now_s=0)
    tables.validate()


def _named(behind: WriteBehind, holder: Holder, tokens: int) -> None:
    names = _names(behind.tables, list(range(tokens)))
    assert behind.tables.try_grow(holder, tokens, now_s=0)
    behind.tables.fill(holder, names.full(tokens).hashes())


def test_while_a_step_runs_a_few_blocks_wait_for_more() -> None:
    tables = _tables(None, blocks=64)
    tables.device.reports = True
    behind = WriteBehind(tables)
    _named(behind, A, 4)
    assert behind.offer(1.0, is_busy=True) is None
    _named(behind, A, 8)
    assert behind.offer(1.0 + OFFER_AFTER_S / 2, is_busy=True) is None
    late = behind.offer(1.0 + OFFER_AFTER_S, is_busy=True)
    assert late is not None and len(late.blocks) == 2
    _named(behind, A, 12)
    assert behind.offer(9.0, is_busy=True) is None, "a new one waits from now on"
    assert behind.offer(9.0) is not None
    _named(behind, A, 12 + 4 * OFFER_BLOCKS)
    many = behind.offer(9.0, is_busy=True)
    assert many is not None and len(many.blocks) == OFFER_BLOCKS


def test_blocks_that_someone_waits_for_are_offered_at_once() -> None:
    tables = _tables(None, blocks=4)
    tables.device.reports = True
    behind = WriteBehind(tables, at_once=True)
    _named(behind, A, 4)
    assert behind.offer(1.0, is_busy=True) is not None


def test_it_is_idle_once_the_node_has_all_that_was_named() -> None:
    tables = _tables(None, blocks=4)
    tables.device.reports = True
    behind = WriteBehind(tables)
    assert behind.idle
    _named(behind, A, 4)
    assert not behind.idle, "not offered"
    offer = behind.offer(1.0)
    assert offer is not None and not behind.idle
    behind.settled(offer.offer)
    assert not behind.idle, "its content is read, but the node can't give it to anybody yet"
    behind.confirmed(offer.offer)
    assert behind.idle


def test_what_a_window_has_passed_is_not_offered() -> None:
    tables = _tables(None, 5)
    tables.device.reports = True
    behind, names = WriteBehind(tables), _names(tables)
    assert tables.try_open(A, 21, seen_from=20, leased=True, now_s=0) == 0
    tables.activate(A)
    tables.fill(A, names.full(20).hashes())
    offer = behind.offer(1.0)
    assert offer is not None
    assert [block.hash for block in offer.blocks] == list(names.full(20).hashes())[4:]


def test_an_end_is_heard_also_of_blocks_that_are_all_passed_over() -> None:
    """Or a prompt that waits for its blocks to be stored would wait for ever."""
    tables = _tables(4)
    tables.device.reports = True
    behind, names = WriteBehind(tables), _names(tables)
    assert tables.try_open(A, 8, seen_from=7, leased=True, now_s=0) == 0
    tables.activate(A)
    tables.fill(A, names.full(4).hashes())
    assert behind.settled_blocks(names.full(4).hashes()) == 0
    offer = behind.offer(1.0)
    assert offer is not None
    assert offer.blocks == ()
    behind.settled(offer.offer)
    behind.confirmed(offer.offer)
    assert behind.settled_blocks(names.full(4).hashes()) == 1
    tables.validate()
