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
        self._queue: OrderedDict[CachedBlock, None] = OrderedDict()
        """# idle block |-> nothing, longest idle first"""

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


_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
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
