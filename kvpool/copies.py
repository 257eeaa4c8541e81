"""Copy-on-write: a shared block is copied before one of its holders writes to it. Pure.

The copies are made before the step that they come with. The source stays as it is until the step
has ended, because another holds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.device_cache import DeviceCache
from kvpool.holding import Holding
from kvpool.layout import BlockId

CopyPairs = tuple[tuple[tuple[BlockId, BlockId], ...], ...]
"""# layer group |-> (source, destination) blocks to copy before writing"""


@dataclass(frozen=True, slots=True)
class Copies:
    cache: DeviceCache

    def try_own(self, entry: Holding, index: int) -> CopyPairs | None:
        """Replaces the `index`-th block, where it is shared, by a copy of one's own.

        Returns the copies to make (empty tuples when none), or None when blocks run out.
        """
        assert index >= len(entry.chain), "a named block is never written"
        pools = self.cache.pools
        shared = [
            pool.is_shared(table[index]) for pool, table in zip(pools, entry.tables, strict=True)
        ]
        if any(own and not pool.available for own, pool in zip(shared, pools, strict=True)):
            return None
        return tuple(
            self._own_one(group, entry.tables[group], index) if wanted else ()
            for group, wanted in enumerate(shared)
        )

    def _own_one(
        self, group: int, table: list[BlockId], index: int
    ) -> tuple[tuple[BlockId, BlockId], ...]:
        (taken,) = self.cache.take(group, 1, leased=False)
        old, table[index] = table[index], taken
        self.cache.release(group, [old])
        return ((old, taken),)
