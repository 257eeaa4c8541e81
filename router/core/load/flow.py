"""What is offered per second, from sums that only grow. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import sqrt

from router.core.load.offered import OfferedWork

OUTPUTS_UNLIKE = 2.0
"""Mean square of outputs over their squared mean, as if spread exponentially."""
SURE = 5.0
"""Standard deviations by which work has changed, and not by chance."""
SHORTEST_S = 5.0
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

    @property
    def bursts(self) -> tuple[float, float]:
        """By what looks differ more than if requests came one by one, by chance: the variance of
        prompts and of outputs over what it would be then; at least 1."""
        if len(self._seen) < 3:
            return 1.0, 1.0
        first, last = self._seen[0][1], self._seen[-1][1]
        prompts = _Steps.of([sums.prompt_tokens for _, sums in self._seen])
        outputs = _Steps.of([sums.output_tokens for _, sums in self._seen])
        _, squares = _then_and_since(first, first, last, "prompt_squares")
        _, unlike = _output_squares(first, first, last)
        return prompts.bursts(squares), outputs.bursts(unlike)


def _changed(seen: deque[_Look]) -> int:
    """The look after which work differs most from before, if that can't be chance; else 0."""
    (first_s, first), (last_s, last) = seen[0], seen[-1]
    prompts = _Steps.of([sums.prompt_tokens for _, sums in seen])
    outputs = _Steps.of([sums.output_tokens for _, sums in seen])
    most, where = SURE, 0
    for index, (at_s, sums) in enumerate(seen):
        if min(at_s - first_s, last_s - at_s) < SHORTEST_S:
            continue
        share = (last_s - at_s) / (at_s - first_s)
        squares = _then_and_since(first, sums, last, "prompt_squares")
        unlike = _output_squares(first, sums, last)
        surprise = max(
            prompts.surprise(index, share, squares), outputs.surprise(index, share, unlike)
        )
        most, where = (surprise, index) if surprise > most else (most, where)
    return where


def _then_and_since(
    first: OfferedWork, then: OfferedWork, last: OfferedWork, key: str
) -> tuple[float, float]:
    middle = getattr(then, key)
    return middle - getattr(first, key), getattr(last, key) - middle


def _output_squares(
    first: OfferedWork, then: OfferedWork, last: OfferedWork
) -> tuple[float, float]:
    tokens = _then_and_since(first, then, last, "output_tokens")
    requests = _then_and_since(first, then, last, "requests")
    before, since = (
        OUTPUTS_UNLIKE * sums**2 / count if count > 0 else 0.0
        for sums, count in zip(tokens, requests, strict=True)
    )
    return before, since


@dataclass(frozen=True, slots=True)
class _Steps:
    """Sums at each look, and the sums of their steps' squares."""

    sums: Sequence[float]
    squares: Sequence[float]

    @staticmethod
    def of(sums: Sequence[float]) -> _Steps:
        steps = ((then - before) ** 2 for before, then in pairwise(sums))
        return _Steps(sums, [*accumulate(steps, initial=0.0)])

    def surprise(self, index: int, share: float, poisson: tuple[float, float]) -> float:
        """By how many standard deviations what came since this look differs from before; `share`:
        of the times. `poisson`: the variances before and since if requests come one by one, by
        chance: the sums of their squares. Where they come in bursts, looks differ by more."""
        end = len(self.sums) - 1
        before, since = self.sums[index] - self.sums[0], self.sums[end] - self.sums[index]
        looks = (self._spread(0, index) + self._spread(index, end)) / end * (end - index)
        variance = max(poisson[1], poisson[0] * share, looks)
        variance += max(poisson[0] * share**2, looks * share)
        return abs(since - before * share) / sqrt(variance) if variance > 0 else 0.0

    def bursts(self, poisson: float) -> float:
        return max(1.0, self._spread(0, len(self.sums) - 1) / poisson) if poisson > 0 else 1.0

    def _spread(self, begin: int, end: int) -> float:
        """Squares of steps around their mean, summed."""
        total = self.sums[end] - self.sums[begin]
        return max(0.0, self.squares[end] - self.squares[begin] - total**2 / (end - begin))
