"""How long workers took to start, counted for a histogram of each phase. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from kvrelay.starts import PhaseSeconds, whole_s

BORDERS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, inf)
WHOLE = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTimes:
    """Of one phase. `counts`: # border |-> starts whose phase took so long, more than one less"""

    counts: Mapping[float, int]
    sum_s: float

    def up_to(self) -> dict[float, int]:
        """# border |-> starts whose phase took at most so long"""
        found, total = {}, 0
        for border in BORDERS_S:
            total += self.counts.get(border, 0)
            found[border] = total
        return found


class Starts:
    """Of the workers that this router heard of first."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, float]] = Counter()
        self._sums_s: defaultdict[str, float] = defaultdict(float)

    def count(self, start: Sequence[PhaseSeconds]) -> None:
        whole = PhaseSeconds(phase=WHOLE, seconds=whole_s(start))
        for one in (*start, whole):
            self._counts[one.phase, BORDERS_S[bisect_left(BORDERS_S, one.seconds)]] += 1
            self._sums_s[one.phase] += one.seconds

    def told(self) -> dict[str, StartTimes]:
        return {
            phase: StartTimes(
                counts={border: self._counts[phase, border] for border in BORDERS_S}, sum_s=sum_s
            )
            for phase, sum_s in self._sums_s.items()
        }
