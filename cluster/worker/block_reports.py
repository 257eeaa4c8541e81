"""Which blocks a worker, and the pool node of its host, hold: as each router's directory hears it.

A router that attaches is told first everything that there is, then every change, in order. All
workers of a host report its pool node; a router keeps what any of them still reports. Runs on the
worker loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cluster.pool.news import PoolNews
from kvpool.device_cache import DeviceCache
from kvpool.pool.client_events import FromNode, PoolJoined, PoolLost
from kvpool.pool.messages import BlocksChanged, PoolTier, PoolWelcome
from kvrelay.messages import BlockChanges
from kvrelay.types import Incarnation, Tier

HASHES_MOST = 8192
"""Of one message: 256 KiB."""


ITSELF = Incarnation("")


class BlockReports:
    """`cache.changes` is the reports' own; without it nothing is told of the cache."""

    def __init__(self, cache: DeviceCache) -> None:
        self._cache = cache
        self._node: PoolWelcome | None = None
        self._in_node: dict[PoolTier, dict[bytes, None]] = {tier: {} for tier in PoolTier}
        self._of_node: list[BlockChanges] = []
        self._since_s: dict[bytes, float] = {}

    def everything(self) -> list[BlockChanges]:
        """For a router that attaches, after `take`."""
        changes: list[BlockChanges] = []
        if self._cache.changes is not None:
            here = tuple(block.hash for block in self._cache.index)
            changes += _stored(ITSELF, Tier.DEVICE, here)
        if self._node is not None:
            for tier, hashes in self._in_node.items():
                changes += _stored(self._node.incarnation, Tier(tier), tuple(hashes))
        return [self._addressed(change) for change in changes]

    def _addressed(self, change: BlockChanges) -> BlockChanges:
        if self._node is None or change.holder != self._node.incarnation:
            return change
        return replace(change, addresses=self._node.addresses)

    def take(self) -> list[BlockChanges]:
        """What is new since the last call."""
        if not (self._of_node or self._cache.changes):
            return []
        changes, self._of_node = self._of_node, []
        if self._cache.changes:
            stored, removed = self._cache.changes.take()
            changes += _stored(ITSELF, Tier.DEVICE, stored)
            changes += _removed(ITSELF, Tier.DEVICE, removed)
            self._date(stored, removed)
        return changes

    def _date(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self._since_s.update(dict.fromkeys(stored, time.monotonic()))
        for block_hash in removed:
            self._since_s.pop(block_hash, None)

    def age_s(self, block_hash: bytes, now_s: float) -> float:
        """Since it was named here; 0 for what is newer than the last `take`."""
        return now_s - self._since_s.get(block_hash, now_s)

    def from_pool(self, event: PoolNews) -> None:
        match event:
            case PoolJoined(welcome=welcome):
                self._node = welcome
            case FromNode(message=BlocksChanged() as changed) if self._node is not None:
                self._note(self._node.incarnation, changed)
            case PoolLost():
                self._lost()
            case _:
                pass

    def _note(self, node: Incarnation, changed: BlocksChanged) -> None:
        held, tier = self._in_node[changed.tier], Tier(changed.tier)
        held.update(dict.fromkeys(changed.stored))
        for block_hash in changed.removed:
            held.pop(block_hash, None)
        changes = [*_stored(node, tier, changed.stored), *_removed(node, tier, changed.removed)]
        self._of_node += map(self._addressed, changes)

    def _lost(self) -> None:
        if self._node is not None:
            gone = BlockChanges(holder=self._node.incarnation, tier=Tier.HOST, gone=True)
            self._of_node = [gone]
        self._node = None
        for held in self._in_node.values():
            held.clear()


def _stored(holder: Incarnation, tier: Tier, hashes: Sequence[bytes]) -> Iterator[BlockChanges]:
    for some in _cut(hashes):
        yield BlockChanges(holder=holder, tier=tier, stored=some)


def _removed(holder: Incarnation, tier: Tier, hashes: Sequence[bytes]) -> Iterator[BlockChanges]:
    for some in _cut(hashes):
        yield BlockChanges(holder=holder, tier=tier, removed=some)


def _cut(hashes: Sequence[bytes]) -> Iterator[tuple[bytes, ...]]:
    for at in range(0, len(hashes), HASHES_MOST):
        yield tuple(hashes[at : at + HASHES_MOST])
