"""Which requests a decode worker takes, and at whose cost. Pure.

Every place that is free is lent to whoever asks. A tier that holds less than its share of the
places always gets one: when all are taken, a sequence on a lent place loses its own at the next
step, and waits until one is free (`TierShares`); and those on lent places step back for its pace
(`Pace`). Refused are, in this order:

    tier_share_exhausted   beyond its share, no place is free, another tier would still get one
    slots_exhausted        beyond its share, no place is free, nobody would get one
    tpot_unreachable       beyond its share, steps would take longer than it or another may bear,
                           by a tenth
    kv_exhausted           no blocks; within its share also none of those on lent places

What is running, waiting, on its way and asking counts. Only requests that bring a
TPOT of their own are refused for it, and only where there are more than their router has counted:
of those it knows how many will have ended by then. The margin is for them, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from decode_worker.batch import Batch
from decode_worker.reservations import Reservations
from decode_worker.sequence import Sequence
from decode_worker.shares import TierShares, strictest_kept_s
from engine.core.step_times import NotCovered, decode_work
from kvrelay.types import RequestSpec

TPOT_MARGIN = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    reservations: Reservations
    batch: Batch

    @property
    def shares(self) -> TierShares:
        return self.batch.running_set.shares

    def held(self) -> Counter[str]:
        """# tier |-> sequences: those here and those on their way"""
        held: Counter[str] = Counter()
        for sequence in self._here():
            held[self.shares.tier_of(sequence.spec)] += len(sequence.choices)
        for spec in self._coming():
            held[self.shares.tier_of(spec)] += spec.sampling.n
        return held

    @property
    def sequences(self) -> int:
        """All that are `held`."""
        return self.batch.running_set.choices + self.reservations.choices

    def _here(self) -> Iterator[Sequence]:
        yield from self.batch.running_set.running
        yield from self.batch.running_set.awaiting_prefill

    def _coming(self) -> Iterator[RequestSpec]:
        yield from self.reservations.specs()

    # --- judging --------------------------------------------------------------------------------

    def refusal(
        self, spec: RequestSpec, asking: Iterable[RequestSpec] = (), counted: int | None = None
    ) -> str | None:
        """Why not, blocks apart; the `asking` ones came before. Beside `counted` sequences its
        router has judged its pace."""
        held = self.held()
        for other in asking:
            held[self.shares.tier_of(other)] += other.sampling.n
        if self._is_own(spec, held):
            return None
        if held.total() + spec.sampling.n > self.shares.slots:
            return self._all_taken(spec, held)
        if self.batch.running_set.lacks_blocks:
            return "kv_exhausted"
        if counted is not None and held.total() <= counted:
            return None
        return "tpot_unreachable" if self._breaks_tpot(spec, held.total()) else None

    def _is_own(self, spec: RequestSpec, held: Counter[str]) -> bool:
        tier = self.shares.tier_of(spec)
        return held[tier] + spec.sampling.n <= self.shares.reserved_slots(tier)

    def _all_taken(self, spec: RequestSpec, held: Counter[str]) -> str:
        others = self.shares.others_may_come(self.shares.tier_of(spec), held)
        return "tier_share_exhausted" if others else "slots_exhausted"

    def _breaks_tpot(self, spec: RequestSpec, sequences: int) -> bool:
        if spec.tpot_s is None or self.batch.times is None:
            return False
        coming = [spec, *self._coming()]
        others_s = strictest_kept_s(self._asked_by_others(), self.batch.times)
        strictest_s = spec.tpot_s if others_s is None else min(spec.tpot_s, others_s)
        kv_tokens = sum(s.context_tokens * s.sampling.n for s in coming)
        kv_tokens += sum(sequence.length for sequence in self._here())
        together = min(sequences + spec.sampling.n, self.shares.slots)
        try:
            step_s = self.batch.times.step_s(decode_work(together, kv_tokens))
        except NotCovered:
            return False
        return step_s > TPOT_MARGIN * strictest_s

    def _asked_by_others(self) -> Iterator[tuple[float | None, int]]:
        """(time per token, context)"""
        yield from ((spec.tpot_s, spec.context_tokens) for spec in self._coming())
        yield from ((sequence.spec.tpot_s, sequence.length) for sequence in self._here())

    # --- blocks ---------------------------------------------------------------------------------

    def may_reclaim(self, spec: RequestSpec) -> bool:
        """Whether blocks of those on lent places are its tier's to have, and enough."""
        if not self._is_own(spec, self.held()):
            return False
        tables = self.batch.tables
        lent_tokens = sum(tables.capacity(s.holder) for s in self._lenders())
        free_tokens = tables.free_blocks * tables.layout.block_size
        return spec.context_tokens < free_tokens + lent_tokens

    def try_reclaim(self) -> bool:
        """Takes the blocks of one on a lent place, between two steps."""
        assert not self.batch.running_set.on_device, "a step is on the device"
        for sequence in self._lenders():
            self.batch.running_set.preempt(sequence)
            return True
        return False

    def _lenders(self) -> Iterator[Sequence]:
        tables, openings = self.batch.tables, self.batch.openings
        for sequence in self.shares.borrowers(self._here()):
            if sequence.holder in tables and not openings.waits(sequence.holder):
                yield sequence
