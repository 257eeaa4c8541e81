"""How far predictions may be off, so that what was promised is kept. Pure.

    actual = overhead + predicted + off * the larger of predicted and usual

The overhead (messages, waking up) is learnt where there was no queue; `off` is a quantile of what
remains, so that with `confidence` 0.95 about 95 % of those admitted keep their objective, whatever
the predictions are like. What a prediction that is shorter than usual is off by is seen against the
usual one.

The quantile is that of a log-normal distribution: so many mean deviations above the mean of the
logarithms. Both change little with each error, as the largest of a few errors does not. How many
deviations is followed where the asked share of errors is below (Robbins and Monro, 1951), in steps
so small that one bad moment, which is many errors at once, changes little.

Errors are told apart by how long the prediction was, in bands of a factor of 2: a step that is
shared with others makes a short prompt take several times as long, and a long one hardly longer. A
band of which little is known lately goes by its neighbours too.

Older errors count less. At a usual rate the last `_MEMORY_S` count; at a high one no more than
`_MOST` errors, and at a low one no fewer than `_LEAST`: a disturbance that is over must not keep
refusing requests, which would have shown that it is.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import exp, frexp, inf, log, pi, sqrt
from statistics import NormalDist

_MEMORY_S, _LEAST, _MOST = 30.0, 20, 256
_FEWEST = 10.0
"""Of errors that weigh less together nothing is known."""
_NEW_SHARE = 0.05
_STEP, _LARGEST_REACH = 0.02, 10.0
"""In mean deviations. At first as a normal distribution has it: 97.5 % are below 2.46 of them."""
_LOWEST, _HIGHEST = 0.5, 4.0
"""Of what it took by what was predicted: one error moves the margin by a few hundredths at most."""


def _band(predicted_s: float) -> int:
    return frexp(predicted_s)[1]


@dataclass(slots=True)
class _Errors:
    """Weighted sums of their logarithms: older ones have faded."""

    weight: float = 0.0
    total: float = 0.0
    deviations: float = 0.0

    def add(self, error: float) -> None:
        known = self.total / self.weight if self.weight else error
        self.weight += 1
        self.total += error
        self.deviations += abs(error - known)

    def quantile(self, reach: float) -> float:
        return exp((self.total + reach * self.deviations) / self.weight)

    def __add__(self, other: _Errors) -> _Errors:
        return _Errors(
            self.weight + other.weight,
            self.total + other.total,
            self.deviations + other.deviations,
        )


@dataclass(slots=True, kw_only=True)
class Margin:
    """For one kind of latency; `at_first`: as long as nothing is known."""

    confidence: float
    at_first: float = 0.0
    overhead_s: float = 0.0
    usual_s: float = 0.0
    reach: float = field(init=False)
    _bands: defaultdict[int, _Errors] = field(default_factory=lambda: defaultdict(_Errors))
    _weight: float = 0.0
    _latest_s: float = -inf
    _offs: dict[int, float] = field(default_factory=dict)  # band |-> quantile, since the last one

    def __post_init__(self) -> None:
        self.reach = sqrt(pi / 2) * NormalDist().inv_cdf(self.confidence)

    def apply(self, predicted_s: float) -> float:
        """Within so many seconds, with the margin's confidence."""
        band = frexp(predicted_s)[1]
        off = self._offs[band] if band in self._offs else self._off(band)
        if predicted_s == inf:
            return inf
        usual_s = self.usual_s
        off_s = off * (predicted_s if predicted_s > usual_s else usual_s)
        return self.overhead_s + predicted_s + off_s

    def growth(self, predicted_s: float) -> float:
        """By how much more it may take for each second that is predicted more."""
        return 1 + (self._off(_band(predicted_s)) if predicted_s >= self.usual_s else 0.0)

    def _off(self, band: int) -> float:
        found = self._offs.get(band)
        if found is None:
            found = self._offs[band] = self._look(band)
        return found

    def _look(self, band: int) -> float:
        if self._weight < _FEWEST:
            return self.at_first
        return max(_LOWEST, min(_HIGHEST, self._near(band).quantile(self.reach))) - 1

    def _near(self, band: int) -> _Errors:
        known = _Errors()
        for other in sorted(self._bands, key=lambda one: abs(one - band)):
            known += self._bands[other]
            if known.weight >= _FEWEST:
                break
        return known

    def observe(
        self, predicted_s: float, actual_s: float, now_s: float, *, undisturbed: bool
    ) -> None:
        """`undisturbed`: nothing was waited for, so what is missing is overhead."""
        if undisturbed:
            missing_s = max(0.0, actual_s - predicted_s)
            self.overhead_s += _NEW_SHARE * (missing_s - self.overhead_s)
        if predicted_s > 0:
            new_share = _NEW_SHARE if self._weight else 1.0
            self.usual_s += new_share * (predicted_s - self.usual_s)
            self._fade(now_s)
            off_s = actual_s - self.overhead_s - predicted_s
            self._learn(_band(predicted_s), off_s / max(predicted_s, self.usual_s))

    def _fade(self, now_s: float) -> None:
        """There is one more."""
        fading = max(1 / _MOST, min(1 / _LEAST, (now_s - self._latest_s) / _MEMORY_S))
        self._latest_s = now_s
        self._weight = (1 - fading) * self._weight + 1
        for errors in self._bands.values():
            errors.weight *= 1 - fading
            errors.total *= 1 - fading
            errors.deviations *= 1 - fading

    def _learn(self, band: int, off: float) -> None:
        off = max(_LOWEST, min(_HIGHEST, 1 + off)) - 1
        if self._weight >= _FEWEST:
            beyond = off > self._off(band)
            step = _STEP * (self.confidence if beyond else self.confidence - 1)
            self.reach = max(0.0, min(_LARGEST_REACH, self.reach + step))
        self._bands[band].add(log(1 + off))
        self._offs.clear()
