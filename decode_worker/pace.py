"""The pace of those on their tiers' own places: who borrows a place steps back where a step would
break it. Pure; one per step.

Who steps back keeps its blocks, and goes on with a later step. It has at least `LEAST_SHARE` of the
pace that it would have alone: a step that it needs for that takes it in, however long it gets.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from itertools import accumulate

from decode_worker.sequence import Sequence
from engine.latency import NotCovered, StepTimes, StepWork, decode_work, prefill_work

USED = 0.9
"""A step may take this much of the strictest time per token: more happens than steps."""
LEAST_SHARE = 0.05
_FEWEST = 16
"""Tokens of a chunk that is worth a step."""


@dataclass(slots=True, kw_only=True)
class Pace:
    """`work` is what the step takes already."""

    times: StepTimes
    most_s: float
    work: StepWork = field(default_factory=StepWork)

    @staticmethod
    def of(own: Iterable[Sequence], times: StepTimes | None) -> Pace | None:
        """None where nobody has asked for a pace that can be kept, or nothing is known of
        steps."""
        if times is None:
            return None
        strictest_s = strictest_kept_s(((s.spec.tpot_s, s.length) for s in own), times)
        return None if strictest_s is None else Pace(times=times, most_s=USED * strictest_s)

    def take(self, decoding: Iterable[Sequence]) -> None:
        lengths = [sequence.length for sequence in decoding]
        self.work += decode_work(len(lengths), sum(lengths))

    def chunk(self, tokens: int, computed: int) -> None:
        self.work += prefill_work(tokens, computed)

    def overdue(self, sequence: Sequence, now_s: float) -> bool:
        """Whether it must be in this step to keep its least share of the pace that it had alone."""
        if sequence.advanced_s is None:
            return False
        alone = decode_work(1, sequence.length)
        if sequence.needed > 1:
            alone = prefill_work(min(sequence.needed, _FEWEST), sequence.computed)
        next_step_s = now_s + self.most_s
        return next_step_s - sequence.advanced_s > self._step_s(alone) / LEAST_SHARE

    def bears(self, lent: Ordered[Sequence]) -> int:
        """How many of them may take their next token too, the first ones first."""
        tokens = accumulate(sequence.length for sequence in lent)
        for count, kv_tokens in enumerate(tokens, start=1):
            if self._step_s(self.work + decode_work(count, kv_tokens)) > self.most_s:
                return count - 1
        return len(lent)

    def bears_chunk(self, sequence: Sequence, tokens: int, now_s: float) -> int:
        """How many of so many tokens of it; 0: not worth it, unless it is overdue."""
        fewest, computed = min(tokens, _FEWEST), sequence.computed
        while tokens and self._step_s(self.work + prefill_work(tokens, computed)) > self.most_s:
            tokens = max(tokens // 2, _FEWEST) if tokens > _FEWEST else 0
        return fewest if not tokens and self.overdue(sequence, now_s) else tokens

    def _step_s(self, work: StepWork) -> float:
        try:
            return self.times.step_s(work)
        except NotCovered:
            return 0.0


def strictest_kept_s(asked: Iterable[tuple[float | None, int]], times: StepTimes) -> float | None:
    """Of times per token, each with the context of who asks for it, the shortest that it could have
    at least alone: for what can't be kept nobody stands back, and nobody is refused."""
    given = sorted((tpot_s, tokens) for tpot_s, tokens in asked if tpot_s is not None)
    return next((tpot_s for tpot_s, tokens in given if _can_be_kept(tpot_s, tokens, times)), None)


def _can_be_kept(tpot_s: float, tokens: int, times: StepTimes) -> bool:
    try:
        return times.step_s(decode_work(1, tokens)) <= tpot_s
    except NotCovered:
        return True
