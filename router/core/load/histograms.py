"""Counts of values between borders, for the histograms of metrics. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """`counts`: # border |-> values that are at most so large, and larger than the border before"""

    counts: Mapping[float, int]
    sum: float

    def up_to(self) -> dict[float, int]:
        """# border |-> values that are at most so large"""
        found, total = {}, 0
        for border, count in self.counts.items():
            total += count
            found[border] = total
        return found


class Histograms:
    """By label. The last border is infinite."""

    def __init__(self, borders: Sequence[float]) -> None:
        self._borders = borders
        self._counts: Counter[tuple[str, float]] = Counter()
        self._sums: defaultdict[str, float] = defaultdict(float)

    def count(self, label: str, value: float) -> None:
        self._counts[label, self._borders[bisect_left(self._borders, value)]] += 1
        self._sums[label] += value

    def told(self) -> dict[str, Histogram]:
        return {
            label: Histogram(
                counts={border: self._counts[label, border] for border in self._borders}, sum=total
            )
            for label, total in self._sums.items()
        }
