"""One group's block pool: all-or-nothing, counted holders, nothing lost."""

from __future__ import annotations

import random

import pytest

from kvpool.core.blocks.pool import BlockPool, BlockState
from kvpool.core.layout.layout import BlockId


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    taken = pool.try_allocate(3)
    assert taken is not None
    assert len(set(taken)) == 3
    assert pool.try_allocate(2) is None
    assert pool.free == 1
    pool.validate()


def test_leased_blocks_become_active_or_free() -> None:
    pool = BlockPool(4)
    kept, dropped = pool.try_allocate(2, leased=True), pool.try_allocate(1, leased=True)
    assert kept is not None
    assert dropped is not None
    assert pool.counts()[BlockState.LEASED] == 3
    pool.activate(kept)
    pool.release(dropped)
    assert pool.counts() == {
        BlockState.FREE: 2,
        BlockState.LEASED: 0,
        BlockState.ACTIVE: 2,
        BlockState.CACHED: 0,
    }
    pool.validate()


def test_a_shared_block_is_free_with_its_last_holder() -> None:
    pool = BlockPool(2)
    blocks = pool.try_allocate(1)
    assert blocks is not None
    pool.hold(blocks)
    assert pool.is_shared(blocks[0])
    pool.release(blocks)
    assert not pool.is_shared(blocks[0])
    assert pool.free == 1
    pool.release(blocks)
    assert pool.free == 2
    pool.validate()


def test_what_is_released_last_to_first_is_reused_in_order() -> None:
    pool = BlockPool(8)
    first = pool.try_allocate(4)
    assert first is not None
    pool.release(first)
    assert pool.try_allocate(4) == first


def test_misuse_is_caught() -> None:
    pool = BlockPool(2)
    active, leased = pool.try_allocate(1), pool.try_allocate(1, leased=True)
    assert active is not None
    assert leased is not None
    with pytest.raises(AssertionError, match="not leased"):
        pool.activate(active)
    with pytest.raises(AssertionError):
        pool.hold(leased)
    pool.release(active)
    with pytest.raises(KeyError):
        pool.release(active)


def test_validate_notices_a_lost_and_a_doubled_block() -> None:
    pool = BlockPool(3)
    pool._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        pool.validate()
    pool._free.append(pool._free[0])
    with pytest.raises(AssertionError, match="twice"):
        pool.validate()


@pytest.mark.parametrize("seed", range(20))
def test_random_schedules_keep_the_law(seed: int) -> None:
    draw, pool = random.Random(seed), BlockPool(12)
    holders: list[tuple[tuple[BlockId, ...], bool]] = []  # blocks, leased
    for _ in range(300):
        match draw.randrange(4):
            case 0:
                leased = draw.random() < 0.3
                free = pool.free
                taken = pool.try_allocate(wanted := draw.randrange(5), leased=leased)
                assert (taken is None) == (wanted > free)
                if taken is not None:
                    holders.append((taken, leased))
            case 1 if holders:
                blocks, _ = holders.pop(draw.randrange(len(holders)))
                pool.release(blocks)
            case 2 if holders:
                blocks, leased = draw.choice(holders)
                if not leased:
                    pool.hold(blocks)
                    holders.append((blocks, False))
            case 3 if holders:
                at = draw.randrange(len(holders))
                if holders[at][1]:
                    pool.activate(holders[at][0])
                    holders[at] = holders[at][0], False
        pool.validate()
        known = {block for blocks, _ in holders for block in blocks}
        assert pool.free == 12 - len(known)
        assert pool.counts()[BlockState.LEASED] == sum(len(b) for b, leased in holders if leased)
    for blocks, _ in holders:
        pool.release(blocks)
    assert pool.free == 12
