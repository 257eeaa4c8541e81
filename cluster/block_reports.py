"""Which blocks a worker, and the pool node of its host, hold: as each router's directory hears it.

A router that attaches is told first everything that there is, then every change, in order. All
workers of a host report its pool node; a router keeps what any of them still reports. Runs on the
worker loop's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvpool.device_cache import DeviceCache
from kvpool.pool_client_events import FromNode, PoolJoined, PoolLost, PoolNews
from kvpool.pool_messages import BlocksChanged, PoolTier
from kvrelay.messages import BlockChanges
from kvrelay.types import Incarnation, Tier

HASHES_MOST = 8192
"""Of one message: 256 KiB."""


ITSELF = Incarnation("")


class BlockReports:
    """`cache.changes` is the reports' own; without it nothing is told of the cache."""

    def __init__(self, cache: DeviceCache) -> None:
        self._cache = cache
        self._node: Incarnation | None = None
        self._in_node: dict[PoolTier, dict[bytes, None]] = {tier: {} for tier in PoolTier}
        self._of_node: list[BlockChanges] = []

    def everything(self) -> list[BlockChanges]:
        """For a router that attaches, after `take`."""
        changes: list[BlockChanges] = []
        if self._cache.changes is not None:
            here = tuple(block.hash for block in self._cache.index)
            changes += _stored(ITSELF, Tier.DEVICE, here)
        if self._node is not None:
            for tier, hashes in self._in_node.items():
                changes += _stored(self._node, Tier(tier), tuple(hashes))
        return changes

    def take(self) -> list[BlockChanges]:
        """What is new since the last call."""
        changes, self._of_node = self._of_node, []
        if self._cache.changes:
            stored, removed = self._cache.changes.take()
            changes += _stored(ITSELF, Tier.DEVICE, stored)
            changes += _removed(ITSELF, Tier.DEVICE, removed)
        return changes

    def from_pool(self, event: PoolNews) -> None:
        match event:
            case PoolJoined(welcome=welcome):
                self._node = welcome.incarnation
            case FromNode(message=BlocksChanged() as changed) if self._node is not None:
                self._note(self._node, changed)
            case PoolLost():
                self._lost()
            case _:
                pass

    def _note(self, node: Incarnation, changed: BlocksChanged) -> None:
        held, tier = self._in_node[changed.tier], Tier(changed.tier)
        held.update(dict.fromkeys(changed.stored))
        for block_hash in changed.removed:
            held.pop(block_hash, None)
        self._of_node += _stored(node, tier, changed.stored)
        self._of_node += _removed(node, tier, changed.removed)

    def _lost(self) -> None:
        if self._node is not None:
            gone = BlockChanges(holder=self._node, tier=Tier.HOST, gone=True)
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
