"""Which sequences of a decode worker go before which: tiers' shares of its places. Pure.

Of a tier's sequences the oldest are its own, as many as its share of the places; others sit on
places that are lent to it. Own ones go first; then by priority; then by arrival.

The pace of those on their tiers' own places: who borrows a place steps back where a step would
break it. Pure; one per step.

Who steps back keeps its blocks, and goes on with a later step. It has at least `LEAST_SHARE` of the
pace that it would have alone: a step that it needs for that takes it in, however long it gets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from itertools import accumulate

from decode_worker.sequence import Sequence
from engine.core.step_times import NotCovered, StepTimes, StepWork, decode_work, prefill_work
from kvrelay.qos import ONE_TIER, QosTiers
from kvrelay.types import RequestSpec


@dataclass(slots=True, kw_only=True)
class TierShares:
    """`places` are those of the worker; without tiers all sequences stand alike."""

    slots: int
    qos: QosTiers = ONE_TIER
    _own: dict[str, int] = field(init=False)  # tier |-> places that are always its
    _priority: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        tiers = self.qos.tiers
        self._own = {tier.name: tier.own_places(self.slots) for tier in tiers}
        self._priority = {tier.name: tier.priority for tier in tiers}

    def tier_of(self, spec: RequestSpec) -> str:
        return spec.qos_tier if spec.qos_tier in self._own else self.qos.default

    @property
    def any_own(self) -> bool:
        return any(self._own.values())

    def reserved_slots(self, tier: str) -> int:
        return self._own[tier]

    def others_may_come(self, tier: str, held: Mapping[str, int]) -> bool:
        """Whether another tier holds less than its share."""
        return any(held.get(name, 0) < own for name, own in self._own.items() if name != tier)

    def order(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """All that are here, who yields last first; equal ones stay as they are."""
        listed = list(sequences)
        if len(self._own) == 1:
            return listed
        lent, priority = self.lent(listed), self._priority
        return sorted(listed, key=lambda s: (s in lent, priority[self.tier_of(s.spec)]))

    def lent(self, sequences: Iterable[Sequence]) -> set[Sequence]:
        """Those on places that are lent to their tiers."""
        seen: Counter[str] = Counter()
        lent = set()
        for sequence in sorted(sequences, key=lambda s: s.arrival):
            tier = self.tier_of(sequence.spec)
            seen[tier] += len(sequence.choices)
            if seen[tier] > self._own[tier]:
                lent.add(sequence)
        return lent

    def borrowers(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Those on lent places, who yields first first: of the last priority, the newest."""
        lent = self.lent(sequences)
        newest_first = sorted(lent, key=lambda s: -s.arrival)
        return sorted(newest_first, key=lambda s: -self._priority[self.tier_of(s.spec)])


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
