"""Prefixes fetched from a pool: chosen by cost, each begin ends once, blocks held meanwhile."""

from __future__ import annotations

import pytest

from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.pool import BlockState
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.client_events import PrefixFetched, PrefixFound, SeekPrefix, WantPrefix
from kvpool.core.fetch.cost import RestoreCost
from kvpool.core.fetch.pool_fetch import Restored, Restores
from kvpool.core.fetch.write_behind import WriteBehind
from kvpool.core.layout.block_names import HashChain
from kvpool.core.layout.layout import NO_BLOCK, KvLayout, LayerGroup, Plane
from kvrelay.types import PrefixOrigin, RequestKey

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


def _restores(tables: BlockTables) -> Restores:
    return Restores(tables=tables, cost=RestoreCost(SIZE))


def _begun(tables: BlockTables, restores: Restores, *, ahead: int = SIZE) -> HashChain:
    names = _names(tables)
    assert tables.try_open(A, 20, hashes=names.full(19).hashes(), ahead_tokens=ahead, now_s=0) == 0
    seek = restores.begin(A, names.full(19).hashes(), 0)
    assert seek == SeekPrefix(key=A.key, hashes=names.full(19).hashes())
    return names


def test_what_is_there_is_fetched_and_named() -> None:
    tables = _tables(None)
    restores = _restores(tables)
    names = _begun(tables, restores)
    want = restores.found(PrefixFound(key=A.key, host_blocks=2, disk_blocks=1), 1.0)
    assert isinstance(want, WantPrefix)
    assert want.hashes == names.full(12).hashes()
    assert [place[0] for place in want.targets] == list(tables.tables(A)[0][:3])
    assert A in restores
    done = restores.fetched(PrefixFetched(key=A.key, blocks=3), 2.0)
    assert done == Restored(holder=A, tokens=12, origin=PrefixOrigin.DISK)
    assert A not in restores
    assert (restores.host_tokens, restores.disk_tokens) == (8, 4)
    assert tables.try_open(B, 20, hashes=names.full(19).hashes(), now_s=2) == 12
    tables.validate()


def test_what_the_worker_has_is_not_fetched() -> None:
    tables = _tables(None)
    restores, names = _restores(tables), _names(tables)
    assert tables.try_grow(B, 8, now_s=0)
    tables.fill(B, names.full(8).hashes())
    assert tables.try_open(A, 20, hashes=names.full(19).hashes(), now_s=0) == 8
    assert restores.begin(A, names.full(19).hashes(), 8) is not None
    want = restores.found(PrefixFound(key=A.key, host_blocks=4, disk_blocks=0), 1.0)
    assert isinstance(want, WantPrefix)
    assert (want.skip, len(want.targets)) == (2, 2)


def test_nothing_more_there_ends_at_once() -> None:
    tables = _tables(None)
    restores = _restores(tables)
    _begun(tables, restores)
    restored = restores.found(PrefixFound(key=A.key, host_blocks=0, disk_blocks=0), 1.0)
    assert restored == Restored.found_here(A, 0)


def test_a_lost_node_leaves_what_was_fetched() -> None:
    tables = _tables(None)
    restores = _restores(tables)
    _begun(tables, restores)
    restores.found(PrefixFound(key=A.key, host_blocks=4, disk_blocks=0), 1.0)
    restored = restores.fetched(PrefixFetched(key=A.key, blocks=1), 2.0)
    assert restored == Restored(holder=A, tokens=4, origin=PrefixOrigin.HOST)
    assert restores.cost.host.seconds is None, "a broken fetch says nothing about its speed"


def test_a_dropped_request_fetches_no_more_and_still_ends() -> None:
    tables = _tables(None)
    restores = _restores(tables)
    _begun(tables, restores)
    assert restores.drop(A) is not None
    restored = restores.found(PrefixFound(key=A.key, host_blocks=4, disk_blocks=0), 1.0)
    assert restored == Restored.found_here(A, 0)
    assert restores.drop(A) is None


def test_a_window_has_room_for_all_that_is_fetched() -> None:
    tables = _tables(None, 5)
    restores = _restores(tables)
    _begun(tables, restores)
    want = restores.found(PrefixFound(key=A.key, host_blocks=4, disk_blocks=0), 1.0)
    assert isinstance(want, WantPrefix)
    assert all(NO_BLOCK not in place for place in want.targets)
    assert restores.fetched(PrefixFetched(key=A.key, blocks=4), 2.0) is not None
    tables.trim(A, 16)
    assert tables.device.counts(1)[BlockState.ACTIVE] == 1
    tables.validate()


def test_without_room_it_is_computed() -> None:
    tables = _tables(None, 5, blocks=5)
    restores = _restores(tables)
    _begun(tables, restores)
    tables.device.take(1, 2, leased=False)
    restored = restores.found(PrefixFound(key=A.key, host_blocks=4, disk_blocks=0), 1.0)
    assert restored == Restored.found_here(A, 0)


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
    assert not behind.has_settled(names.full(4).hashes())
    offer = behind.offer(1.0)
    assert offer is not None
    assert offer.blocks == ()
    behind.settled(offer.offer)
    assert behind.has_settled(names.full(4).hashes())
    tables.validate()
