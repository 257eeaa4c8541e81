"""What is offered per second, from sums that only grow. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import sqrt

from router.core.load.offered import OfferedWork

OUTPUTS_UNLIKE = 2.0
"""Mean square of outputs over their squared mean, as if spread exponentially."""
SURE = 4.0
"""Standard deviations by which work has changed, and not by chance."""
SHORTEST_S = 3.0
"""Less time says nothing."""

_Look = tuple[float, OfferedWork]


@dataclass(slots=True, kw_only=True)
class OfferedRate:
    """Over the last `window_s`, or since what is offered has clearly changed. Sums that have shrunk
    come from routers that began anew."""

    window_s: float
    _seen: deque[_Look] = field(default_factory=deque)

    def note(self, now_s: float, sums: OfferedWork) -> None:
        if self._seen and sums.requests < self._seen[-1][1].requests:
            self._seen.clear()
        self._seen.append((now_s, sums))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - self.window_s:
            self._seen.popleft()
        for _ in range(_changed(self._seen)):
            self._seen.popleft()

    @property
    def covers_s(self) -> float:
        return self._seen[-1][0] - self._seen[0][0] if self._seen else 0.0

    @property
    def per_second(self) -> OfferedWork:
        """Nothing, before two looks."""
        if not self.covers_s:
            return OfferedWork()
        return (self._seen[-1][1] - self._seen[0][1]).scaled(1 / self.covers_s)


def _changed(seen: deque[_Look]) -> int:
    """The look after which work differs most from before, if that can't be chance; else 0."""
    (first_s, first), (last_s, last) = seen[0], seen[-1]
    most, where = SURE, 0
    for index, (at_s, sums) in enumerate(seen):
        if min(at_s - first_s, last_s - at_s) < SHORTEST_S:
            continue
        surprise = _surprise(first, sums, last, (last_s - at_s) / (at_s - first_s))
        most, where = (surprise, index) if surprise > most else (most, where)
    return where


def _surprise(first: OfferedWork, then: OfferedWork, last: OfferedWork, share: float) -> float:
    """By how many standard deviations prompts or outputs differ since then from before; `share`: of
    the times. A sum of requests that come by chance has the variance of the sum of squares."""
    before, since = then.requests - first.requests, last.requests - then.requests
    prompts = then.prompt_tokens - first.prompt_tokens, last.prompt_tokens - then.prompt_tokens
    squares = then.prompt_squares - first.prompt_squares, last.prompt_squares - then.prompt_squares
    outputs = then.output_tokens - first.output_tokens, last.output_tokens - then.output_tokens
    unlike = _squares(outputs[0], before), _squares(outputs[1], since)
    return max(_deviation(prompts, squares, share), _deviation(outputs, unlike, share))


def _deviation(sums: tuple[float, float], squares: tuple[float, float], share: float) -> float:
    variance = max(squares[1], squares[0] * share) + squares[0] * share**2
    return abs(sums[1] - sums[0] * share) / sqrt(variance) if variance > 0 else 0.0


def _squares(output_tokens: float, requests: float) -> float:
    return OUTPUTS_UNLIKE * output_tokens**2 / requests if requests > 0 else 0.0
