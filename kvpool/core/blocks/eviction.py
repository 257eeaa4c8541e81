"""Chooses the idle run of a prefix tree from whose end to evict next. Pure; one policy object per
tree.

A policy judges a run by its uses and by the time since it became idle. It never prefers to keep the
less used or the longer idle one. The tree releases chains from their ends, so a parent is used at
least as often, and idle no longer, than its children. So every such policy evicts the leaves of the
prefix tree first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import inf

from kvpool.core.blocks.runs import Run, RunPolicy
from kvpool.core.layout.hashes import BlockHash
from kvrelay.errors import ConfigError

_COUNTED_USES = 7
_REMEMBERED_PER_IDLE = 2
_LEAST_REMEMBERED = 1_000
_AGES = 64
"""Age a is an idle time of a bits: from 2^(a-1) up to 2^a."""
_EVENTS_PER_UPDATE = 1 << 14
_KEPT_SHARE = 0.9
"""Each update keeps this share of the counts, so old habits fade."""

_PerAge = list[float]


class LeastRecentlyUsed:
    """The run that has been idle longest."""

    def __init__(self) -> None:
        self._queue: OrderedDict[Run, None] = OrderedDict()
        """# idle run |-> nothing, longest idle first"""

    def __contains__(self, run: Run) -> bool:
        return run in self._queue

    def remembers(self, _block_hash: BlockHash) -> bool:
        return False

    def cached(self, run: Run) -> None:
        """Evicted runs are not remembered."""

    def idle(self, runs: Sequence[Run]) -> None:
        self._queue.update(dict.fromkeys(runs))

    def reused(self, run: Run) -> None:
        self._queue.pop(run, None)

    def victim(self) -> Run:
        return next(iter(self._queue))

    def evicted(self, run: Run, blocks: int) -> None:
        if blocks == run.blocks:
            del self._queue[run]


_Remembered = tuple[int, int, int]
"""The evicted end of a run: its level, since when it was idle, its number of blocks."""


class LeastReuseDensity:
    """Evicts the run with the fewest expected reuses per time that it would stay, as far as blocks
    of equal uses and idle time show.

    Evicted runs are remembered for a while, about two blocks for each idle one. A run that comes
    back shows that it left too early, and continues with its earlier uses.
    """

    def __init__(self) -> None:
        levels = _COUNTED_USES + 1
        self.history = ReuseDensity(levels)
        self._queues: list[OrderedDict[Run, None]] = [OrderedDict() for _ in range(levels)]
        self._levels = [*zip(self._queues, self.history.densities, strict=True)]
        self._evicted: OrderedDict[BlockHash, _Remembered] = OrderedDict()
        """# first block |-> the evicted end of a run that began there; longest evicted first"""
        self._cut: dict[Run, BlockHash] = {}
        """# idle run that has lost its end |-> the first block of that"""
        self._remembered_blocks = 0
        self._idle_so_far = 0  # the clock: blocks that became idle
        self._idle_blocks = 0

    def __contains__(self, run: Run) -> bool:
        return run in self._queues[_level(run)]

    def remembers(self, block_hash: BlockHash) -> bool:
        return block_hash in self._evicted

    def cached(self, run: Run) -> None:
        remembered = self._evicted.pop(run.first, None)
        if remembered is None:
            return
        level, idle_since, blocks = remembered
        self._remembered_blocks -= blocks
        self.history.saw_reuse(level, self._idle_so_far - idle_since, min(blocks, run.blocks))
        run.uses = level + 1
        if run.parent is not None:
            run.uses = min(run.uses, run.parent.uses)

    def idle(self, runs: Sequence[Run]) -> None:
        for run in runs:
            blocks = run.blocks
            self._idle_blocks += blocks
            self._idle_so_far += blocks
            run.idle_since = self._idle_so_far
            self._queues[_level(run)][run] = None

    def reused(self, run: Run) -> None:
        level, blocks = _level(run), run.blocks
        self._queues[level].pop(run, None)
        self._cut.pop(run, None)
        self._idle_blocks -= blocks
        self.history.saw_reuse(level, self._idle_so_far - run.idle_since, blocks)

    def victim(self) -> Run:
        """Of each level the oldest run is looked at. Most of the policy's time goes here."""
        found, least, now = None, inf, self._idle_so_far
        for queue, densities in self._levels:
            for oldest in queue:
                density = densities[(now - oldest.idle_since).bit_length()]
                if density < least:
                    found, least = oldest, density
                break
        assert found is not None, "nothing is idle"
        return found

    def evicted(self, run: Run, blocks: int) -> None:
        level, kept = _level(run), run.blocks - blocks
        self._idle_blocks -= blocks
        first = run.at(run.start + kept)
        self._remember(run, first, level, blocks)
        if kept:
            self._cut[run] = first
        else:
            del self._queues[level][run]

    def _remember(self, run: Run, first: BlockHash, level: int, blocks: int) -> None:
        """What went from the end of this run before is remembered together with what goes now."""
        self._remembered_blocks += blocks
        if (cut := self._cut.pop(run, None)) is not None and cut in self._evicted:
            _, _, before = self._evicted.pop(cut)
            blocks += before
        self._evicted[first] = (level, run.idle_since, blocks)
        self._forget_some()

    def _forget_some(self) -> None:
        most = _REMEMBERED_PER_IDLE * self._idle_blocks + _LEAST_REMEMBERED
        while self._remembered_blocks > most:
            _, (level, idle_since, blocks) = self._evicted.popitem(last=False)
            self._remembered_blocks -= blocks
            self.history.saw_eviction(level, self._idle_so_far - idle_since, blocks)


def _level(run: Run) -> int:
    return run.uses if run.uses < _COUNTED_USES else _COUNTED_USES


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
        self.densities: list[_PerAge] = [[2.0**-a for a in range(_AGES)] for _ in range(levels)]
        """# level |-> age |-> density: never falls with the level, never rises with age. The lists
        are renewed in place."""
        self._events = 0

    def saw_reuse(self, level: int, idle_time: int, blocks: int) -> None:
        self._count(self._reused[level], idle_time, blocks)

    def saw_eviction(self, level: int, idle_time: int, blocks: int) -> None:
        self._count(self._evicted[level], idle_time, blocks)

    def _count(self, ends: _PerAge, idle_time: int, blocks: int) -> None:
        ends[idle_time.bit_length()] += blocks
        self._events += blocks
        if self._events >= _EVENTS_PER_UPDATE:
            self._events = 0
            self._update()

    def _update(self) -> None:
        floor = [0.0] * _AGES
        for level, (reused, evicted) in enumerate(zip(self._reused, self._evicted, strict=True)):
            floor = list(map(max, floor, _never_rising(_densities(reused, evicted))))
            self.densities[level][:] = floor
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
    lowest, result = inf, []
    for density in densities:
        lowest = min(lowest, density)
        result.append(lowest)
    return result


_POLICIES: dict[str, Callable[[], RunPolicy]] = {
    "lru": LeastRecentlyUsed,
    "reuse": LeastReuseDensity,
}

DEFAULT_POLICY = "lru"


def policies() -> tuple[str, ...]:
    return tuple(_POLICIES)


def open_policy(name: str) -> RunPolicy:
    """Raises ConfigError for an unknown policy, with the names of the known ones."""
    policy = _POLICIES.get(name)
    if policy is None:
        raise ConfigError(f"no eviction policy {name!r}; there are: {', '.join(policies())}")
    return policy()
