"""What routers are told of the blocks that a worker holds."""

from __future__ import annotations

import pytest

from cluster.core.worker import reports as block_reports
from cluster.core.worker.reports import BlockReports
from kvpool.core.blocks.block_news import BlockNews
from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.layout.hashes import BlockHash
from kvrelay.messages import BlockChanges
from kvrelay.types import RequestKey, Tier
from tests.unit.worker_kit import BLOCK, LAYOUT


def _tables(blocks: int = 4) -> BlockTables:
    tables = BlockTables(LAYOUT, blocks)
    tables.device.changes = BlockNews()
    return tables


def _compute(tables: BlockTables, first: int, blocks: int) -> tuple[BlockHash, ...]:
    tokens = range(first, first + blocks * BLOCK)
    names, holder = tables.chain("", len(tokens)), Holder("prefill", RequestKey("r", 0))
    names.extend(tokens, len(tokens))
    assert tables.try_grow(holder, len(tokens), now_s=0)
    tables.fill(holder, names.full(len(tokens)))
    tables.release(holder)
    return tuple(names.full(len(tokens)))


def test_a_block_that_came_and_went_in_between_is_not_told() -> None:
    tables = _tables()
    reports = BlockReports(tables.device)
    first = _compute(tables, 0, 3)
    assert reports.take(0) == [BlockChanges(tier=Tier.DEVICE, stored=first)]
    _compute(tables, 100, 4)
    last = _compute(tables, 200, 4)
    assert reports.take(0) == [
        BlockChanges(tier=Tier.DEVICE, stored=last),
        BlockChanges(tier=Tier.DEVICE, removed=first[::-1]),
    ]
    assert reports.take(0) == []
    assert reports.everything() == [BlockChanges(tier=Tier.DEVICE, stored=last)]


def test_no_message_is_longer_than_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reports, "HASHES_MOST", 3)
    tables = _tables(8)
    reports = BlockReports(tables.device)
    hashes = _compute(tables, 0, 8)
    for told in (reports.take(0), reports.everything()):
        assert [len(changes.stored) for changes in told] == [3, 3, 2]
        assert sum((changes.stored for changes in told), ()) == hashes
