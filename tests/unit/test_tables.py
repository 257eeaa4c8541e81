"""Tables over several groups: growth, forks, copy-on-write and leases, with nothing orphaned."""

from __future__ import annotations

import random

import pytest

from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.pool import BlockState
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane
from kvrelay.types import RequestKey

_PLANE = (Plane(name="k", heads=1, dim=2),)


def _tables(blocks: int = 8) -> BlockTables:
    groups = (LayerGroup(layers=(0,), planes=_PLANE), LayerGroup(layers=(1,), planes=_PLANE))
    return BlockTables(KvLayout(groups=groups, dtype="float32", block_size=4), blocks)


def _holder(request_id: str, choice: int = 0) -> Holder:
    return Holder("decode", RequestKey(request_id, 0), choice)


def test_growth_takes_blocks_in_every_group_only_when_needed() -> None:
    tables, a = _tables(), _holder("a")
    assert tables.capacity(a) == 0
    assert tables.try_grow(a, 5, now_s=0.0)
    assert tables.capacity(a) == 8
    before = tables.tables(a)
    assert tables.try_grow(a, 8, now_s=0.0)
    assert tables.tables(a) == before
    assert tables.try_grow(a, 9, now_s=0.0)
    assert [len(table) for table in tables.tables(a)] == [3, 3]
    assert all(new[:2] == old for new, old in zip(tables.tables(a), before, strict=True))
    tables.validate()


def test_grown_tables_are_the_same_object_until_they_grow() -> None:
    tables, a = _tables(), _holder("a")
    assert tables.try_grow(a, 5, now_s=0.0)
    before = tables.tables(a)
    assert tables.grown(a, 8, now_s=0.0) is before
    grown = tables.grown(a, 9, now_s=0.0)
    assert grown is not None and [len(table) for table in grown] == [3, 3]
    assert tables.tables(a) is grown
    assert tables.grown(a, 4 * (tables.blocks + 1), now_s=0.0) is None
    assert tables.tables(a) is grown
    tables.validate()


def test_tables_are_the_same_object_until_they_change() -> None:
    tables, a, b = _tables(), _holder("a"), _holder("b")
    assert tables.try_grow(a, 5, now_s=0.0)
    before = tables.tables(a)
    assert tables.try_grow(a, 8, now_s=0.0)
    assert tables.tables(a) is before
    assert tables.try_grow(a, 12, now_s=0.0)
    grown = tables.tables(a)
    tables.shrink(a, 8)
    assert tables.tables(a) == before and grown != before
    tables.fork(a, b, now_s=0.0)
    assert tables.tables(b) == before
    assert tables.try_own(b, 5) is not None
    assert tables.tables(a) == before != tables.tables(b)
    tables.validate()


def test_growth_is_all_or_nothing_over_the_groups() -> None:
    tables, a, b = _tables(2), _holder("a"), _holder("b")
    taken = tables.device.pools[1].try_allocate(1)
    assert taken is not None
    assert not tables.try_grow(a, 8, now_s=0.0)
    assert a not in tables
    assert tables.device.pools[0].free == 2
    assert tables.try_grow(b, 4, now_s=0.0)
    assert not tables.try_grow(b, 5, now_s=0.0)
    assert tables.capacity(b) == 4
    tables.device.pools[1].give_back(taken)
    tables.validate()


def test_a_lease_covers_later_growth_until_it_is_activated() -> None:
    tables, a = _tables(), _holder("a")
    assert tables.try_grow(a, 4, now_s=1.0, leased=True)
    assert tables.try_grow(a, 8, now_s=2.0)
    assert tables.counts()[BlockState.LEASED] == 2
    (held,) = tables.held()
    assert (held.state, held.since_s) == (BlockState.LEASED, 1.0)
    tables.activate(a)
    assert tables.counts()[BlockState.ACTIVE] == 2
    with pytest.raises(AssertionError, match="holds no lease"):
        tables.activate(a)
    tables.validate()


def test_a_fork_shares_and_a_writer_makes_its_block_its_own() -> None:
    tables, a, b = _tables(), _holder("a", 0), _holder("a", 1)
    assert tables.try_grow(a, 8, now_s=0.0)
    tables.fork(a, b, now_s=1.0)
    assert tables.tables(b) == tables.tables(a)
    assert tables.free_blocks == 6
    old = tables.tables(a)
    pairs = tables.try_own(b, 5)
    assert pairs is not None
    for group, ((source, target),) in enumerate(pairs):
        assert source == old[group][1]
        assert tables.tables(b)[group] == (old[group][0], target)
    assert tables.tables(a) == old
    assert tables.try_own(b, 5) == ((), ())
    assert tables.try_own(a, 7) == ((), ()), "the last holder needs no copy"
    assert tables.try_own(a, 0) != ((), ())
    tables.validate()


def test_owning_without_a_free_block_changes_nothing() -> None:
    tables, a, b = _tables(2), _holder("a", 0), _holder("a", 1)
    assert tables.try_grow(a, 4, now_s=0.0)
    tables.fork(a, b, now_s=0.0)
    taken = tables.device.pools[1].try_allocate(1)
    assert taken is not None
    before = tables.tables(b)
    assert tables.try_own(b, 0) is None
    assert tables.tables(b) == before
    assert tables.device.pools[0].free == 1
    tables.device.pools[1].give_back(taken)
    assert tables.try_own(b, 0) is not None
    tables.validate()


def test_a_fork_grows_alone_and_outlives_its_source() -> None:
    tables, a, b = _tables(), _holder("a", 0), _holder("a", 1)
    assert tables.try_grow(a, 8, now_s=0.0)
    tables.fork(a, b, now_s=0.0)
    assert tables.try_grow(b, 12, now_s=0.0)
    assert tables.capacity(a) == 8
    tables.release(a)
    assert tables.free_blocks == 5
    tables.release(b)
    tables.release(b)
    assert tables.free_blocks == 8
    tables.validate()


def test_orphans_are_counted() -> None:
    tables = _tables()
    tables.device.pools[0].try_allocate(2)
    assert tables.orphaned() == 2
    with pytest.raises(AssertionError, match="2 orphaned"):
        tables.validate()


@pytest.mark.parametrize("seed", range(20))
def test_random_schedules_lose_no_block_and_mix_up_no_content(seed: int) -> None:
    """Each holder's tokens, written through its tables, read back as if it were alone."""
    draw, tables = random.Random(seed), _tables(10)
    slots: list[dict[int, int]] = [{}, {}]  # group |-> slot |-> value
    expected: dict[Holder, list[int]] = {}
    for step in range(400):
        holder = _holder(draw.choice("abc"), draw.randrange(3))
        match draw.randrange(4):
            case 0 | 1 if tables.try_grow(
                holder, len(expected.get(holder, [])) + 1, now_s=float(step)
            ):
                _append(tables, slots, expected.setdefault(holder, []), holder, step)
            case 2:
                tables.release(holder)
                expected.pop(holder, None)
            case 3 if expected and holder not in tables:
                source = draw.choice(sorted(expected))
                tables.fork(source, holder, now_s=float(step))
                expected[holder] = list(expected[source])
        tables.validate()
        for known, values in expected.items():
            assert _contents(tables, slots, known, len(values)) == [values, values]
    for known in list(expected):
        tables.release(known)
    assert tables.free_blocks == 10


def _append(
    tables: BlockTables, slots: list[dict[int, int]], values: list[int], holder: Holder, value: int
) -> None:
    pairs = tables.try_own(holder, len(values))
    if pairs is None:
        return
    for memory, copies in zip(slots, pairs, strict=True):
        for source, target in copies:
            memory |= {target * 4 + i: memory.get(source * 4 + i, -1) for i in range(4)}
    block, within = divmod(len(values), 4)
    for memory, table in zip(slots, tables.tables(holder), strict=True):
        memory[table[block] * 4 + within] = value
    values.append(value)


def _contents(
    tables: BlockTables, slots: list[dict[int, int]], holder: Holder, tokens: int
) -> list[list[int]]:
    return [
        [memory[table[t // 4] * 4 + t % 4] for t in range(tokens)]
        for memory, table in zip(slots, tables.tables(holder), strict=True)
    ]
