"""Chooses the idle block of a prefix cache to evict next. Pure; one policy object per index.

A policy judges a block by its uses and by the time since it became idle. It never prefers to keep
the less used or the longer idle one. The prefix index releases chains from their ends, so a parent
is used at least as often, and idle no longer, than its children. So every such policy evicts the
leaves of the prefix tree first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvpool.core.layout.hashes import BlockHash
from kvpool.core.layout.layout import BlockId
from kvrelay.errors import ConfigError

Place = tuple[BlockId, ...]
"""# layer group |-> block of this tier that holds the KV"""


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A block's KV under its hash, and its node in the prefix tree.

    `children` counts the cached blocks that continue it, `holders` the requests that need it,
    `uses` the requests that found or computed it. `idle_since` belongs to the policy, `tenant` is a
    label for reports.
    """

    hash: BlockHash
    parent: CachedBlock | None
    place: Place
    children: int = 0
    holders: int = 1
    uses: int = 1
    idle_since: int = 0
    tenant: str = ""


_COUNTED_USES = 7
_REMEMBERED_PER_IDLE = 2
_LEAST_REMEMBERED = 1_000
_AGES = 64
"""Age a is an idle time of a bits: from 2^(a-1) up to 2^a."""
_EVENTS_PER_UPDATE = 1 << 14
_KEPT_SHARE = 0.9
"""Each update keeps this share of the counts, so old habits fade."""

_PerAge = list[float]


class EvictionPolicy(Protocol):
    """Holds exactly the idle blocks of one index. Constant time per call."""

    def __len__(self) -> int: ...
    def __contains__(self, block: CachedBlock, /) -> bool: ...

    def cached(self, block: CachedBlock) -> None:
        """The block is new, and held. A policy that remembers it may raise its uses, but not above
        those of its parent."""

    def idle(self, blocks: Iterable[CachedBlock]) -> None:
        """The last holder of each has released it, in this order."""

    def reused(self, block: CachedBlock) -> None:
        """An idle block is held again."""

    def victim(self) -> CachedBlock:
        """Removes and returns the block to evict now. At least one block is idle."""


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
        """Evicted blocks are not remembered."""

    def idle(self, blocks: Iterable[CachedBlock]) -> None:
        for block in blocks:
            self._queue[block] = None

    def reused(self, block: CachedBlock) -> None:
        del self._queue[block]

    def victim(self) -> CachedBlock:
        return self._queue.popitem(last=False)[0]


class LeastReuseDensity:
    """Evicts the block with the fewest expected reuses per time that it would stay, as far as
    blocks of equal uses and idle time show.

    Evicted blocks are remembered for a while, about two for each idle one. A block that comes back
    shows that it left too early, and continues with its earlier uses.
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

    def idle(self, blocks: Iterable[CachedBlock]) -> None:
        for block in blocks:
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


class ReuseDensity:
    """The statistics of one pool's history, applied to blocks that are idle now.

    It counts how idle times end, by level of uses (a higher level was used more often) and age. The
    density of a block is the expected number of reuses per time that it would stay: hit density as
    in "LHD: Improving Cache Hit Rate by Maximizing Hit Density" (Beckmann, Chen and Cidon, NSDI
    2018), here over levels of uses. Time is counted in blocks that became idle.
    """

    def __init__(self, levels: int) -> None:
        self._reused: list[_PerAge] = [[0.0] * _AGES for _ in range(levels)]
        self._evicted: list[_PerAge] = [[0.0] * _AGES for _ in range(levels)]
        # Nothing is known yet: the longer idle, the less.
        self._density: list[_PerAge] = [[2.0**-a for a in range(_AGES)] for _ in range(levels)]
        self._events = 0

    def density(self, level: int, idle_time: int) -> float:
        """Never falls with the level, never rises with idle time."""
        return self._density[level][idle_time.bit_length()]

    def saw_reuse(self, level: int, idle_time: int) -> None:
        self._count(self._reused[level], idle_time)

    def saw_eviction(self, level: int, idle_time: int) -> None:
        self._count(self._evicted[level], idle_time)

    def _count(self, ends: _PerAge, idle_time: int) -> None:
        ends[idle_time.bit_length()] += 1
        self._events += 1
        if self._events % _EVENTS_PER_UPDATE == 0:
            self._update()

    def _update(self) -> None:
        floor = [0.0] * _AGES
        for level, (reused, evicted) in enumerate(zip(self._reused, self._evicted, strict=True)):
            floor = list(map(max, floor, _never_rising(_densities(reused, evicted))))
            self._density[level] = floor
            reused[:] = [count * _KEPT_SHARE for count in reused]
            evicted[:] = [count * _KEPT_SHARE for count in evicted]


def _densities(reused: _PerAge, evicted: _PerAge) -> _PerAge:
    """# age |-> reuses from that age on / how much longer the idle times that reach it last"""
    densities = [0.0] * _AGES
    reuses = ends = stay = 0.0
    for age in reversed(range(_AGES)):
        reuses += reused[age]
        ends += reused[age] + evicted[age]
        stay += ends * 2.0**age
        densities[age] = reuses / stay if stay else 0.0
    return densities


def _never_rising(densities: _PerAge) -> _PerAge:
    lowest, result = float("inf"), []
    for density in densities:
        lowest = min(lowest, density)
        result.append(lowest)
    return result


_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "reuse": LeastReuseDensity,
}

DEFAULT_POLICY = "lru"


def policies() -> tuple[str, ...]:
    return tuple(_POLICIES)


def open_policy(name: str) -> EvictionPolicy:
    """Raises ConfigError for an unknown policy, with the names of the known ones."""
    policy = _POLICIES.get(name)
    if policy is None:
        raise ConfigError(f"no eviction policy {name!r}; there are: {', '.join(policies())}")
    return policy()
