"""Which idle block of a prefix cache goes next. Pure; one policy object per index.

A policy may judge a block by its uses and by the time since it became idle, never preferring to
keep the less used or the longer idle. The prefix index lets chains go from their ends, so a parent
is used at least as often and idle no longer than its children: every such policy evicts the leaves
of the prefix tree first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from kvpool.cached_block import CachedBlock
from kvpool.learnt_eviction import LeastReuseDensity
from kvrelay.errors import ConfigError

_Queue = OrderedDict[CachedBlock, None]
"""# idle block |-> nothing, longest idle first"""


class EvictionPolicy(Protocol):
    """Holds exactly the idle blocks of one index. Constant time per call."""

    def __len__(self) -> int: ...
    def __contains__(self, block: CachedBlock, /) -> bool: ...

    def cached(self, block: CachedBlock) -> None:
        """The block is new, and held. A policy that remembers it may raise its uses, but not above
        its parent's."""

    def idle(self, block: CachedBlock) -> None:
        """The block's last holder let go."""

    def reused(self, block: CachedBlock) -> None:
        """An idle block is held again."""

    def victim(self) -> CachedBlock:
        """Take out the block to evict now. At least one is idle."""


class LeastRecentlyUsed:
    """The block that has been idle longest."""

    def __init__(self) -> None:
        self._queue: _Queue = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, block: CachedBlock) -> bool:
        return block in self._queue

    def cached(self, block: CachedBlock) -> None:
        """Nothing is remembered of it."""

    def idle(self, block: CachedBlock) -> None:
        self._queue[block] = None

    def reused(self, block: CachedBlock) -> None:
        del self._queue[block]

    def victim(self) -> CachedBlock:
        return self._queue.popitem(last=False)[0]


class LeastFrequentlyUsed:
    """The block with the fewest uses since it was cached, the longest idle among equals."""

    _COUNTED_USES = 255

    def __init__(self) -> None:
        self._queues: list[_Queue] = [OrderedDict() for _ in range(self._COUNTED_USES + 1)]
        self._occupied = 0  # bit u is set when queue u holds blocks
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __contains__(self, block: CachedBlock) -> bool:
        return block in self._queues[self._level(block)]

    def _level(self, block: CachedBlock) -> int:
        return min(block.uses, self._COUNTED_USES)

    def cached(self, block: CachedBlock) -> None:
        """Nothing is remembered of it."""

    def idle(self, block: CachedBlock) -> None:
        level = self._level(block)
        self._queues[level][block] = None
        self._occupied |= 1 << level
        self._len += 1

    def reused(self, block: CachedBlock) -> None:
        level = self._level(block)
        del self._queues[level][block]
        self._left(level)

    def victim(self) -> CachedBlock:
        level = (self._occupied & -self._occupied).bit_length() - 1
        block, _ = self._queues[level].popitem(last=False)
        self._left(level)
        return block

    def _left(self, level: int) -> None:
        self._len -= 1
        if not self._queues[level]:
            self._occupied &= ~(1 << level)


_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "reuse": LeastReuseDensity,
}

DEFAULT_POLICY = "lru"


def policies() -> tuple[str, ...]:
    return tuple(_POLICIES)


def open_policy(name: str) -> EvictionPolicy:
    """Raises ConfigError for a policy that does not exist, naming those that do."""
    policy = _POLICIES.get(name)
    if policy is None:
        raise ConfigError(f"no eviction policy {name!r}; there are: {', '.join(policies())}")
    return policy()
