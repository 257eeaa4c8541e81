"""Which blocks a worker holds, as each router's directory hears it.

A router that attaches is told first everything that there is, then every change, in order. Runs on
the worker loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from kvpool.device_cache import DeviceCache
from kvrelay.messages import BlockChanges
from kvrelay.types import Tier

HASHES_MOST = 8192
"""Of one message: 256 KiB."""


class BlockReports:
    """`cache.changes` is the reports' own; without it nothing is told."""

    def __init__(self, cache: DeviceCache) -> None:
        self._cache = cache
        self._since_s: dict[bytes, float] = {}

    def everything(self) -> list[BlockChanges]:
        """For a router that attaches, after `take`."""
        if self._cache.changes is None:
            return []
        return [*_stored([block.hash for block in self._cache.index])]

    def take(self) -> list[BlockChanges]:
        """What is new since the last call."""
        if not self._cache.changes:
            return []
        stored, removed = self._cache.changes.take()
        self._date(stored, removed)
        return [*_stored(stored), *_removed(removed)]

    def _date(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self._since_s.update(dict.fromkeys(stored, time.monotonic()))
        for block_hash in removed:
            self._since_s.pop(block_hash, None)

    def age_s(self, block_hash: bytes, now_s: float) -> float:
        """Since it was named here; 0 for what is newer than the last `take`."""
        return now_s - self._since_s.get(block_hash, now_s)


def _stored(hashes: Sequence[bytes]) -> Iterator[BlockChanges]:
    for some in _cut(hashes):
        yield BlockChanges(tier=Tier.DEVICE, stored=some)


def _removed(hashes: Sequence[bytes]) -> Iterator[BlockChanges]:
    for some in _cut(hashes):
        yield BlockChanges(tier=Tier.DEVICE, removed=some)


def _cut(hashes: Sequence[bytes]) -> Iterator[tuple[bytes, ...]]:
    for at in range(0, len(hashes), HASHES_MOST):
        yield tuple(hashes[at : at + HASHES_MOST])
