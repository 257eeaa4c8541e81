"""Copy-on-write: blocks of one's own that begin as others' do. Pure.

The copies are made before the step that they come with. What is copied from stays as it is until
the step has ended, for `try_own` because another holds it, for `begin_like` by the holding.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.device_cache import DeviceCache
from kvpool.holding import Holding
from kvpool.layout import BlockId
from kvpool.siblings import Content

CopyPairs = tuple[tuple[tuple[BlockId, BlockId], ...], ...]
"""# layer group |-> (source, destination) blocks to copy before writing"""

LEAST_COPIED_TOKENS = 2
"""Fewer are computed. Two are copied in no more time than they are computed in with the rest of a
chunk, on a CPU (bench.partial_blocks)."""


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

    def begin_like(self, entry: Holding, content: Content) -> tuple[int, CopyPairs]:
        """The first block behind its chain shall begin with `content`: how many tokens of it
        another block has, and the copies to make. They are copied from until `end`."""
        tokens, block = self.cache.find_like(content)
        if block is None or tokens < LEAST_COPIED_TOKENS:
            return 0, ()
        self.cache.index.touch(block)
        entry.sources += enumerate(block.place)
        for group, part in entry.sources:
            self.cache.hold(group, [part])
        own = (table[len(entry.chain)] for table in entry.tables)
        return tokens, tuple(((part, mine),) for part, mine in zip(block.place, own, strict=True))

    def end(self, entry: Holding) -> None:
        """The copies are made."""
        sources, entry.sources = entry.sources, []
        for group, part in sources:
            self.cache.release(group, [part])
