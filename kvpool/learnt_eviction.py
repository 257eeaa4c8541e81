"""Eviction by what the pool's own history tells of reuse. Pure."""

from __future__ import annotations

from collections import OrderedDict

from kvpool.cached_block import CachedBlock
from kvpool.hashes import BlockHash
from kvpool.reuse_density import ReuseDensity

_COUNTED_USES = 7
_REMEMBERED_PER_IDLE = 2
_LEAST_REMEMBERED = 1_000


class LeastReuseDensity:
    """The block with the fewest reuses to expect per time that it would stay, as far as blocks of
    equal uses and idle time tell.

    Evicted blocks are remembered for a while, about two for each idle one: a block that comes back
    teaches that it left too early, and goes on with the uses it had.
    """

    def __init__(self) -> None:
        levels = _COUNTED_USES + 1
        self.history = ReuseDensity(levels)
        self._queues: list[OrderedDict[CachedBlock, None]] = [OrderedDict() for _ in range(levels)]
        self._evicted: OrderedDict[BlockHash, tuple[int, int]] = OrderedDict()
        """# block |-> level, idle since; longest evicted first"""
        self._idle_so_far = 0  # the clock: blocks that became idle
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __contains__(self, block: CachedBlock) -> bool:
        return block in self._queues[self._level(block)]

    def _level(self, block: CachedBlock) -> int:
        return min(block.uses, _COUNTED_USES)

    def cached(self, block: CachedBlock) -> None:
        remembered = self._evicted.pop(block.hash, None)
        if remembered is None:
            return
        level, idle_since = remembered
        self.history.saw_reuse(level, self._idle_so_far - idle_since)
        block.uses = level + 1
        if block.parent is not None:
            block.uses = min(block.uses, block.parent.uses)

    def idle(self, block: CachedBlock) -> None:
        self._idle_so_far += 1
        block.idle_since = self._idle_so_far
        self._queues[self._level(block)][block] = None
        self._len += 1

    def reused(self, block: CachedBlock) -> None:
        level = self._level(block)
        del self._queues[level][block]
        self._len -= 1
        self.history.saw_reuse(level, self._idle_so_far - block.idle_since)

    def victim(self) -> CachedBlock:
        levels = (level for level, queue in enumerate(self._queues) if queue)
        level = min(levels, key=self._density_of_oldest)
        block, _ = self._queues[level].popitem(last=False)
        self._len -= 1
        self._remember(block, level)
        return block

    def _density_of_oldest(self, level: int) -> float:
        oldest = next(iter(self._queues[level]))
        return self.history.density(level, self._idle_so_far - oldest.idle_since)

    def _remember(self, block: CachedBlock, level: int) -> None:
        self._evicted[block.hash] = level, block.idle_since
        if len(self._evicted) > _REMEMBERED_PER_IDLE * self._len + _LEAST_REMEMBERED:
            _, (level, idle_since) = self._evicted.popitem(last=False)
            self.history.saw_eviction(level, self._idle_so_far - idle_since)
