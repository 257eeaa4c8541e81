"""How far predictions may be off, so that what was promised is kept. Pure.

    actual = overhead + predicted + off * the larger of predicted and usual

The overhead (messages, waking up) is learnt where there was no queue; `off` is a quantile of what
remains, over the latest requests. So with `confidence` 0.95 about 95 % of those admitted keep their
objective, whatever the predictions are like. What a prediction that is shorter than usual is off by
is seen against the usual one.

Errors are kept by how long the prediction was, in bands of a factor of 2: a step that is shared
with others makes a short prompt take several times as long, and a long one hardly longer. A band
of which little is known lately goes by its neighbours too. What is older than half a minute counts
only while there is little else: a disturbance that is over must not keep refusing requests, which
would have shown that it is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from dataclasses import dataclass, field
from math import frexp, inf

_MOST_KEPT, _ALWAYS_KEPT = 256, 64
_YOUNG_S = 30.0
_FEWEST = 20
"""Of fewer requests nothing is known."""
_NEW_SHARE = 0.05
_LEAST, _MOST = -0.5, 7.0


def _band(predicted_s: float) -> int:
    return frexp(predicted_s)[1]


@dataclass(slots=True, kw_only=True)
class Margin:
    """For one kind of latency; `at_first`: as long as nothing is known."""

    confidence: float
    at_first: float = 0.0
    overhead_s: float = 0.0
    usual_s: float = 0.0
    _latest: deque[tuple[float, int, float]] = field(default_factory=deque)  # (when, band, off)
    _bands: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _offs: dict[int, float] = field(default_factory=dict)  # band |-> quantile, since the last one

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
        if len(self._latest) < _FEWEST:
            return self.at_first
        known = self._bands[band]
        if len(known) < _FEWEST:
            known = self._with_neighbours(band)
        index = min(len(known) - 1, int(self.confidence * len(known)))
        return max(_LEAST, min(_MOST, known[index]))

    def _with_neighbours(self, band: int) -> list[float]:
        known: list[float] = []
        for other in sorted(self._bands, key=lambda one: abs(one - band)):
            known += self._bands[other]
            if len(known) >= _FEWEST:
                break
        return sorted(known)

    def observe(
        self, predicted_s: float, actual_s: float, now_s: float, *, undisturbed: bool
    ) -> None:
        """`undisturbed`: nothing was waited for, so what is missing is overhead."""
        if undisturbed:
            missing_s = max(0.0, actual_s - predicted_s)
            self.overhead_s += _NEW_SHARE * (missing_s - self.overhead_s)
        if predicted_s > 0:
            new_share = _NEW_SHARE if self._latest else 1.0
            self.usual_s += new_share * (predicted_s - self.usual_s)
            off_s = actual_s - self.overhead_s - predicted_s
            self._keep(_band(predicted_s), off_s / max(predicted_s, self.usual_s), now_s)

    def _keep(self, band: int, off: float, now_s: float) -> None:
        self._offs.clear()
        self._latest.append((now_s, band, off))
        insort(self._bands[band], off)
        while len(self._latest) > self._room(now_s):
            _, old_band, oldest = self._latest.popleft()
            offs = self._bands[old_band]
            del offs[bisect_left(offs, oldest)]

    def _room(self, now_s: float) -> int:
        return _ALWAYS_KEPT if self._latest[0][0] < now_s - _YOUNG_S else _MOST_KEPT
