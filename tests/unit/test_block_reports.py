"""What routers are told of the blocks that a worker holds."""

from __future__ import annotations

import pytest

from cluster.core.worker import reports as block_reports
from cluster.core.worker.reports import BlockReports
from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.news import ROOT, RunNews
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.layout.hashes import BlockHashes
from kvrelay.messages import BlockChanges, CutRun, StoredRun
from kvrelay.types import RequestKey, Tier
from tests.unit.worker_kit import BLOCK, LAYOUT


def _tables(blocks: int = 4) -> BlockTables:
    tables = BlockTables(LAYOUT, blocks)
    tables.device.changes = RunNews(tables.device.tree)
    return tables


def _compute(tables: BlockTables, first: int, blocks: int) -> BlockHashes:
    tokens = range(first, first + blocks * BLOCK)
    names, holder = tables.chain("", len(tokens)), Holder("prefill", RequestKey("r", 0))
    names.extend(tokens, len(tokens))
    assert tables.try_grow(holder, len(tokens), now_s=0)
    tables.fill(holder, names.full(len(tokens)).hashes())
    tables.release(holder)
    return names.full(len(tokens)).hashes()


def _stored(number: int, hashes: BlockHashes, start: int = 0) -> StoredRun:
    parent = number if start else ROOT
    return StoredRun(number=number, parent=parent, start=start, hashes=hashes.packed)


def test_a_run_that_came_and_went_in_between_is_not_told() -> None:
    tables = _tables()
    reports = BlockReports(tables.device)
    first = _compute(tables, 0, 3)
    assert reports.take(0) == [BlockChanges(tier=Tier.DEVICE, stored=(_stored(1, first),))]
    _compute(tables, 100, 4)
    last = _compute(tables, 200, 4)
    told = reports.take(0)
    gone = (CutRun(number=1, end=0),)
    assert told == [BlockChanges(tier=Tier.DEVICE, cut=gone, stored=(_stored(3, last),))]
    assert reports.take(0) == []
    now = BlockChanges(tier=Tier.DEVICE, stored=(_stored(3, last),))
    assert reports.everything() == [now]


def test_much_is_told_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reports, "HASHES_MOST", 2)
    tables = _tables(8)
    reports = BlockReports(tables.device)
    one, other = _compute(tables, 0, 3), _compute(tables, 100, 2)
    pages = [_stored(1, one[:2]), _stored(1, one[2:], 2), _stored(2, other[:1])]
    told = reports.take(0)
    assert [run for page in told for run in page.stored] == [*pages, _stored(2, other[1:], 1)]
    assert told == reports.everything()
    assert all(sum(len(run.hashes) for run in page.stored) <= 64 for page in told)


def test_ages_are_those_of_a_strands_first_and_latest_blocks() -> None:
    tables = _tables(8)
    reports = BlockReports(tables.device)
    names, holder = tables.chain("", 4 * BLOCK), Holder("prefill", RequestKey("r", 0))
    names.extend(range(4 * BLOCK), 4 * BLOCK)
    assert tables.try_grow(holder, 4 * BLOCK, now_s=0)
    for blocks, now_s in ((1, 10.0), (3, 15.0)):
        tables.fill(holder, names.full(blocks * BLOCK).hashes())
        reports.take(now_s)
    assert reports.ages_s(1, 17.0) == (7.0, 2.0)
    assert reports.ages_s(2, 17.0) == (0.0, 0.0)
    tables.release(holder)
    tables.device.take(0, 8, leased=False)
    reports.take(18.0)
    assert reports.ages_s(1, 20.0) == (0.0, 0.0)
