"""One group's block pool: all-or-nothing, counted holders, nothing lost."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvpool.core.blocks.pool import BlockPool
from kvpool.core.layout.layout import BlockId


def _release(pool: BlockPool, blocks: Sequence[BlockId]) -> None:
    pool.give_back(pool.drop(blocks))


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
    assert pool.leased == 3
    pool.activate(kept)
    assert dropped is not None
    _release(pool, dropped)
    assert (pool.free, pool.leased) == (2, 0)
    pool.validate()


def test_a_shared_block_is_free_with_its_last_holder() -> None:
    pool = BlockPool(2)
    blocks = pool.try_allocate(1)
    assert blocks is not None
    pool.share(blocks)
    assert pool.is_shared(blocks[0])
    _release(pool, blocks)
    assert not pool.is_shared(blocks[0])
    assert pool.free == 1
    _release(pool, blocks)
    assert pool.free == 2
    pool.validate()


def test_what_is_released_last_to_first_is_reused_in_order() -> None:
    pool = BlockPool(8)
    first = pool.try_allocate(4)
    assert first is not None
    _release(pool, first)
    assert pool.try_allocate(4) == first


def test_misuse_is_caught() -> None:
    pool = BlockPool(2)
    active, leased = pool.try_allocate(1), pool.try_allocate(1, leased=True)
    assert active is not None
    assert leased is not None
    with pytest.raises(AssertionError, match="not leased"):
        pool.activate(active)
    with pytest.raises(AssertionError):
        pool.share(leased)
    _release(pool, active)
    _release(pool, active)
    with pytest.raises(AssertionError, match="free twice"):
        pool.validate()


def test_validate_notices_a_doubled_block() -> None:
    pool = BlockPool(3)
    pool._free[-1] = pool._free[0]
    with pytest.raises(AssertionError, match="twice"):
        pool.validate()


@pytest.mark.parametrize("seed", range(20))
def test_random_schedules_keep_the_law(seed: int) -> None:
    draw, pool = random.Random(seed), BlockPool(12)
    holders: list[tuple[Sequence[BlockId], bool]] = []  # blocks, leased
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
                _release(pool, blocks)
            case 2 if holders:
                blocks, leased = draw.choice(holders)
                if not leased:
                    pool.share(blocks)
                    holders.append((blocks, False))
            case 3 if holders:
                at = draw.randrange(len(holders))
                if holders[at][1]:
                    pool.activate(holders[at][0])
                    holders[at] = holders[at][0], False
        pool.validate()
        known = {block for blocks, _ in holders for block in blocks}
        assert pool.free == 12 - len(known)
        assert pool.leased == sum(len(b) for b, leased in holders if leased)
    for blocks, _ in holders:
        _release(pool, blocks)
    assert pool.free == 12
