"""What routers are told of the blocks that a worker, and its host's pool node, hold."""

from __future__ import annotations

import pytest

from cluster.worker import block_reports
from cluster.worker.block_reports import BlockReports
from kvpool.block_news import BlockNews
from kvpool.hashes import BlockHash
from kvpool.holder import Holder
from kvpool.pool.client_events import FromNode, PoolJoined, PoolLost
from kvpool.pool.messages import BlocksChanged, PoolTier, PoolWelcome
from kvpool.tables import BlockTables
from kvrelay.messages import BlockChanges
from kvrelay.types import Incarnation, RequestKey, Tier
from router.directory import Directory
from tests.unit.worker_kit import BLOCK, LAYOUT

ITSELF, WORKER, NODE = Incarnation(""), Incarnation("w"), Incarnation("node")
X, Y, Z = (BlockHash(bytes([n]) * 32) for n in (1, 2, 3))


def _tables(blocks: int = 4) -> BlockTables:
    tables = BlockTables(LAYOUT, blocks)
    tables.cache.changes = BlockNews()
    return tables


def _compute(tables: BlockTables, first: int, blocks: int) -> tuple[BlockHash, ...]:
    tokens = range(first, first + blocks * BLOCK)
    names, holder = tables.chain("", len(tokens)), Holder("prefill", RequestKey("r", 0))
    names.extend(tokens, len(tokens))
    assert tables.try_grow(holder, len(tokens), now_s=0)
    tables.fill(holder, names.full(len(tokens)))
    tables.release(holder)
    return tuple(names.full(len(tokens)))


def _joined() -> PoolJoined:
    welcome = PoolWelcome(wire_version=1, incarnation=NODE, region="r", lease_ttl_s=1.0)
    return PoolJoined(welcome=welcome)


def test_a_block_that_came_and_went_in_between_is_not_told() -> None:
    tables = _tables()
    reports = BlockReports(tables.cache)
    first = _compute(tables, 0, 3)
    assert reports.take() == [BlockChanges(holder=ITSELF, tier=Tier.DEVICE, stored=first)]
    _compute(tables, 100, 4)
    last = _compute(tables, 200, 4)
    assert reports.take() == [
        BlockChanges(holder=ITSELF, tier=Tier.DEVICE, stored=last),
        BlockChanges(holder=ITSELF, tier=Tier.DEVICE, removed=first[::-1]),
    ]
    assert reports.take() == []
    assert reports.everything() == [BlockChanges(holder=ITSELF, tier=Tier.DEVICE, stored=last)]


def test_the_pool_node_is_told_too_and_ends_with_its_connection() -> None:
    reports = BlockReports(_tables().cache)
    reports.from_pool(_joined())
    reports.from_pool(FromNode(message=BlocksChanged(tier=PoolTier.HOST, stored=(X, Y))))
    changed = BlocksChanged(tier=PoolTier.HOST, stored=(Z,), removed=(X,))
    reports.from_pool(FromNode(message=changed))
    reports.from_pool(FromNode(message=BlocksChanged(tier=PoolTier.DISK, stored=(X,))))
    late, early = Directory(), Directory()
    for changes in reports.take():
        early.changed(WORKER, changes)
    for changes in reports.everything():
        late.changed(WORKER, changes)
    for directory in (early, late):
        assert directory.longest([Y, Z]) == directory.longest([X, Y]) == {NODE: 2}
        assert directory.entries == 3
    reports.from_pool(PoolLost(reason="gone"))
    for changes in reports.take():
        early.changed(WORKER, changes)
    assert early.entries == 0
    assert reports.everything() == []


def test_no_message_is_longer_than_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reports, "HASHES_MOST", 3)
    tables = _tables(8)
    reports = BlockReports(tables.cache)
    hashes = _compute(tables, 0, 8)
    for told in (reports.take(), reports.everything()):
        assert [len(changes.stored) for changes in told] == [3, 3, 2]
        assert sum((changes.stored for changes in told), ()) == hashes
