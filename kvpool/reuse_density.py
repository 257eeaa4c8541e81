"""What a pool's history tells about blocks that are idle now. Pure.

The density of a block is the number of reuses to expect per time that it would go on staying: hit
density as in "LHD: Improving Cache Hit Rate by Maximizing Hit Density" (Beckmann, Chen and Cidon,
NSDI 2018), here over levels of uses. Time is counted in blocks that became idle.
"""

from __future__ import annotations

_AGES = 64
"""Age a is an idle time of a bits: from 2^(a-1) up to 2^a."""
_EVENTS_PER_UPDATE = 1 << 14
_REMEMBERED = 0.9
"""Share of what was known that each update keeps: old habits fade."""

_PerAge = list[float]


class ReuseDensity:
    """Counts how idle times end, by level of uses (a higher level was used more often) and age."""

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
            reused[:] = [count * _REMEMBERED for count in reused]
            evicted[:] = [count * _REMEMBERED for count in evicted]


def _densities(reused: _PerAge, evicted: _PerAge) -> _PerAge:
    """# age |-> reuses from that age on / how long the idle times that reach it go on"""
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
