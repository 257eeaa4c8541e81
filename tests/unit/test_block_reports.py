"""What routers are told of the blocks that a worker holds."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from cluster.core.worker import reports as block_reports
from cluster.core.worker.reports import BlockReports
from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.news import ROOT, RunNews
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.layout.block_names import HashChain
from kvpool.core.layout.hashes import BlockHashes
from kvrelay.messages import BlockChanges, CutRun, StoredRun
from kvrelay.types import Incarnation, RequestKey, Tier
from router.core.state.directory import Directory
from tests.unit.directory_kit import known, unpacked
from tests.unit.worker_kit import BLOCK, LAYOUT

WORKER = Incarnation("worker")


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


@pytest.mark.parametrize("seed", range(10))
def test_a_directory_knows_what_the_device_has(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts share beginnings, sequences grow, and there is no room for all. One router was there
    from the beginning, others come later."""
    monkeypatch.setattr(block_reports, "HASHES_MOST", 3)
    draw, tables = random.Random(seed), _tables(12)
    reports, directories = BlockReports(tables.device), [Directory()]
    open_: list[_Sequence] = []
    cuts = grown = below = 0
    for number in range(600):
        match draw.randrange(8):
            case 0 | 1 | 2 if len(open_) < 3:
                tokens = [
                    token for token in draw.choices((1, 2), (5, 1), k=5) for _ in range(BLOCK)
                ]
                _begin(tables, open_, number, tokens[: draw.randint(1, len(tokens))])
            case 3 | 4 | 5 if open_:
                _grow(tables, draw.choice(open_))
            case 6 if open_:
                tables.release(open_.pop(draw.randrange(len(open_))).holder)
            case 7:
                told = reports.take(number)
                for directory in directories:
                    _hear(directory, told)
                stored = [run for changes in told for run in changes.stored]
                cuts += sum(len(changes.cut) for changes in told)
                grown += sum(run.parent == run.number for run in stored)
                below += sum(run.parent not in (ROOT, run.number) for run in stored)
                if draw.random() < 0.1:
                    directories.append(Directory())
                    _hear(directories[-1], reports.everything())
                held = {one for run in tables.device.tree for one in unpacked(bytes(run.hashes))}
                expected = {WORKER: {Tier.DEVICE: held}} if held else {}
                assert all(known(directory) == expected for directory in directories)
    assert len(directories) > 2 and min(cuts, grown, below) > 10, (cuts, grown, below)


@dataclass(slots=True)
class _Sequence:
    holder: Holder
    names: HashChain
    tokens: list[int]


def _begin(tables: BlockTables, open_: list[_Sequence], number: int, tokens: list[int]) -> None:
    names = tables.chain("", 100)
    names.extend(tokens, len(tokens))
    one = _Sequence(Holder("prefill", RequestKey(str(number), 0)), names, tokens)
    if (
        tables.try_open(one.holder, len(tokens), hashes=names.full(len(tokens) - 1), now_s=0)
        is None
    ):
        return
    tables.fill(one.holder, names.full(len(tokens)))
    open_.append(one)


def _grow(tables: BlockTables, one: _Sequence) -> None:
    """By a block."""
    one.tokens += [3] * BLOCK
    if tables.try_grow(one.holder, len(one.tokens), now_s=0):
        one.names.extend(one.tokens, len(one.tokens))
        tables.fill(one.holder, one.names.full(len(one.tokens)))
    else:
        del one.tokens[-BLOCK:]


def _hear(directory: Directory, told: list[BlockChanges]) -> None:
    for changes in told:
        directory.changed(WORKER, changes)
    directory.validate()
