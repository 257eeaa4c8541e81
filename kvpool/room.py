"""Blocks for holdings, over all groups of a layout: taken, held and given back. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.device_cache import DeviceCache
from kvpool.holding import Holding
from kvpool.layout import NO_BLOCK


@dataclass(frozen=True, slots=True)
class Room:
    """What is `missing` is asked first, so that all groups get theirs or none does."""

    cache: DeviceCache

    def has(
        self, entry: Holding, tokens: int, window_tokens: int | None, *, opening: bool = False
    ) -> bool:
        """Whether there are blocks for `tokens` tokens in all (in groups with a window:
        `window_tokens`). `opening`: its tables aren't held yet, and what is cached of them will no
        longer make room."""
        for group, pool in enumerate(self.cache.pools):
            _, missing = entry.lacks(group, tokens, window_tokens)
            revived = pool.cached_among(entry.tables[group]) if opening else 0
            if missing > pool.available - revived:
                return False
        return True

    def extend(self, entry: Holding, tokens: int, window_tokens: int | None) -> None:
        """After `has`."""
        for group, table in enumerate(entry.tables):
            passed, missing = entry.lacks(group, tokens, window_tokens)
            table.extend([NO_BLOCK] * passed)
            if missing:
                table.extend(self.cache.take(group, missing, leased=entry.leased))

    def hold(self, entry: Holding) -> None:
        """One more holder of all that it has."""
        self.cache.hold_chain(entry.chain)
        for group in range(len(entry.tables)):
            self.cache.hold(group, entry.real(group))
        for group, block in entry.twins:
            self.cache.hold(group, [block])

    def release(self, entry: Holding) -> None:
        for group, block in entry.twins:
            self.cache.release(group, [block])
        for group in range(len(entry.tables)):
            self.cache.release(group, entry.real(group))
        self.cache.release_chain(entry.chain)
