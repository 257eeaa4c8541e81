"""Whose blocks a pool node's tiers hold, and since when."""

from __future__ import annotations

import pytest

from kvpool.core.layout import hashes
from kvpool.core.layout.hashes import OTHERS, BlockHash, TenantBlocks
from kvpool.core.node.checked_blocks import BlockOrigins
from kvpool.core.node.messages import ChainBlock, PoolTier

HOST, DISK = PoolTier.HOST, PoolTier.DISK
A, B, C, D = (BlockHash(bytes([n]) * 32) for n in range(4))


def of(tenant: str, blocks: int, oldest_s: float, newest_s: float) -> TenantBlocks:
    return TenantBlocks(tenant=tenant, blocks=blocks, oldest_s=oldest_s, newest_s=newest_s)


def test_blocks_are_told_by_tier_and_tenant_with_their_ages() -> None:
    origins = BlockOrigins()
    origins.labelled([ChainBlock(A, None, "x"), ChainBlock(B, A, "x"), ChainBlock(C, None)])
    for now_s, block in ((1.0, A), (2.0, B), (3.0, C)):
        origins.now_s = now_s
        origins.came(HOST, [block])
    origins.now_s = 5.0
    origins.came(DISK, [A])
    assert origins.cached(HOST, 10.0) == [of("x", 2, 9.0, 8.0), of("", 1, 7.0, 7.0)]
    assert origins.cached(DISK, 10.0) == [of("x", 1, 5.0, 5.0)]
    origins.went(HOST, [B, A])
    assert origins.cached(HOST, 10.0) == [of("", 1, 7.0, 7.0)]
    origins.validate()
    origins.went(DISK, [A])
    assert origins.cached(DISK, 10.0) == []
    origins.validate()


def test_what_was_on_disk_before_stays_nobodys() -> None:
    origins = BlockOrigins()
    origins.came(DISK, [A])
    origins.labelled([ChainBlock(A, None, "x")])
    origins.came(HOST, [A])
    assert origins.cached(HOST, 0.0) == [of("", 1, 0.0, 0.0)]
    origins.went(DISK, [A])
    origins.went(HOST, [A])
    assert origins.cached(DISK, 0.0) == origins.cached(HOST, 0.0) == []
    origins.validate()


def test_only_the_largest_are_told_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "_SHOWN_MOST", 1)
    origins = BlockOrigins()
    blocks = [ChainBlock(A, None, "x"), ChainBlock(B, A, "x"), ChainBlock(C, None, "y")]
    origins.labelled([*blocks, ChainBlock(D, None, "z")])
    for now_s, block in enumerate((D, A, B, C)):
        origins.now_s = now_s
        origins.came(HOST, [block])
    assert origins.cached(HOST, 4.0) == [of("x", 2, 3.0, 2.0), of(OTHERS, 2, 4.0, 1.0)]
