"""Lines between measured points. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from engine.latency import NotCovered


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Ascending measured values of what `name` says; `source` is for messages."""

    values: tuple[float, ...]
    name: str
    source: str
    extrapolate: bool = False

    def line(self, x: float) -> tuple[int, int, float]:
        """The two points whose line `x` is on, and where between them it is, in [0, 1] unless
        beyond. Raises NotCovered beyond the values, but where extrapolation was asked for."""
        first, last = self.values[0], self.values[-1]
        if not self.extrapolate and not first <= x <= last:
            raise NotCovered(
                f"{self.source}: {x:g} {self.name} asked, measured are {first:g} to {last:g}; "
                "set extrapolate: true in the profile to go beyond"
            )
        if x in (first, last) or first == last:
            end = 0 if x == first or first == last else len(self.values) - 1
            return end, end, 0.0
        high = min(max(bisect_left(self.values, x), 1), len(self.values) - 1)
        span = self.values[high] - self.values[high - 1]
        return high - 1, high, (x - self.values[high - 1]) / span


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Straight lines between measured points; see `Axis.line` for what is beyond them."""

    axis: Axis
    ys: tuple[float, ...]

    def at(self, x: float) -> float:
        low, high, share = self.axis.line(x)
        return self.ys[low] + (self.ys[high] - self.ys[low]) * share


def curve_of_medians(
    points: Iterable[tuple[float, float]], *, x_name: str, source: str, extrapolate: bool
) -> Curve:
    """Repeated measurements at one x count by their median. At least one point is needed."""
    groups = groupby(sorted(points), key=lambda point: point[0])
    medians = [(x, median(y for _, y in group)) for x, group in groups]
    xs = tuple(x for x, _ in medians)
    axis = Axis(values=xs, name=x_name, source=source, extrapolate=extrapolate)
    return Curve(axis=axis, ys=tuple(y for _, y in medians))
