"""How far predictions may be off, so that what was promised is kept. Pure.

    actual = overhead + factor * predicted

The overhead (messages, waking up) is learnt where there was no queue; the factor is a quantile of
what remains, over the latest requests. So with `confidence` 0.95 about 95 % of those admitted keep
their objective, whatever the predictions are like. What a prediction that is shorter than usual is
off by is seen against the usual one: some milliseconds more say little of long ones.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

_KEPT = 256
_FEWEST = 20
"""Before so many requests nothing is known."""
_NEW_SHARE = 0.05
_LEAST, _MOST = 0.5, 8.0


@dataclass(slots=True, kw_only=True)
class Margin:
    """For one kind of latency."""

    confidence: float
    overhead_s: float = 0.0
    usual_s: float = 0.0
    factor: float = field(init=False, default=1.0)
    _latest: deque[float] = field(default_factory=deque)
    _ascending: list[float] = field(default_factory=list)

    def apply(self, predicted_s: float) -> float:
        """Within so many seconds, with the margin's confidence."""
        return self.overhead_s + self.factor * predicted_s

    def observe(self, predicted_s: float, actual_s: float, *, undisturbed: bool) -> None:
        """`undisturbed`: nothing was waited for, so what is missing is overhead."""
        if undisturbed:
            missing_s = max(0.0, actual_s - predicted_s)
            self.overhead_s += _NEW_SHARE * (missing_s - self.overhead_s)
        if predicted_s > 0:
            new_share = _NEW_SHARE if self._latest else 1.0
            self.usual_s += new_share * (predicted_s - self.usual_s)
            off_s = actual_s - self.overhead_s - predicted_s
            self._keep(1 + off_s / max(predicted_s, self.usual_s))

    def _keep(self, ratio: float) -> None:
        self._latest.append(ratio)
        insort(self._ascending, ratio)
        if len(self._latest) > _KEPT:
            oldest = self._latest.popleft()
            del self._ascending[bisect_left(self._ascending, oldest)]
        if len(self._ascending) >= _FEWEST:
            index = min(len(self._ascending) - 1, int(self.confidence * len(self._ascending)))
            self.factor = max(_LEAST, min(_MOST, self._ascending[index]))
