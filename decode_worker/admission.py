"""Which requests a decode worker accepts, and which sequences lose their blocks for them. Pure.

Any tier may use any free slot. A tier below its reservation always gets a slot: when all are taken,
a borrower is preempted at the next step and resumes later; borrowers also pause for the pace of
others (`Packing`). A request is refused for the first of these reasons:

    tier_share_exhausted   no slot is free, beyond its tier's reservation; another tier gets one
    slots_exhausted        the same, but no other tier would get one either
    tpot_unreachable       beyond its tier's reservation, steps would take longer than its own
                           TPOT, or that of others, by more than a tenth
    kv_exhausted           no blocks; within its tier's reservation, none from borrowers either

A displaced request was admitted before and has lost its worker. As if within its tier's
reservation, it gets slots and blocks of borrowers, but only of lower priority, and is not refused
for a pace.

Sequences that run, wait, are reserved or ask count. Only requests with a TPOT objective are refused
for it, and only where there are more sequences than their router has counted: the router knows how
many of those will have ended by then. The margin of a tenth allows for them, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from decode_worker.batch import Batch
from decode_worker.packing import strictest_kept_s
from decode_worker.reservations import Reservations
from decode_worker.sequence import Sequence
from engine.core.step_times import NotCovered, decode_work
from kvrelay.errors import RefusalReason
from kvrelay.types import RequestSpec

TPOT_MARGIN = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    reservations: Reservations
    batch: Batch

    def held(self) -> Counter[str]:
        """# tier |-> its sequences that run, wait or are reserved"""
        held: Counter[str] = Counter()
        shares = self.batch.shares
        for sequence in self._here():
            held[shares.tier_of(sequence.spec)] += len(sequence.choices)
        for spec in self.reservations.specs():
            held[shares.tier_of(spec)] += spec.sampling.n
        return held

    def _here(self) -> Iterator[Sequence]:
        yield from self.batch.running_set.running
        yield from self.batch.running_set.awaiting_prefill

    # --- judging --------------------------------------------------------------------------------

    def refusal(
        self,
        spec: RequestSpec,
        asking: Iterable[RequestSpec] = (),
        counted: int | None = None,
        *,
        displaced: bool = False,
    ) -> RefusalReason | None:
        """Why not, blocks apart. Those `asking` came before it. Its router has judged its pace
        beside `counted` sequences."""
        held = self.held()
        for other in asking:
            held[self.batch.shares.tier_of(other)] += other.sampling.n
        if self._is_within_reservation(spec, held):
            return None
        yielding = self._lower(spec, held) if displaced else 0
        if held.total() - yielding + spec.sampling.n > self.batch.shares.slots:
            return self._all_taken(spec, held)
        if self.batch.running_set.lacks_blocks and not yielding:
            return RefusalReason.KV_EXHAUSTED
        if displaced or (counted is not None and held.total() <= counted):
            return None
        return RefusalReason.TPOT_UNREACHABLE if self._breaks_tpot(spec, held.total()) else None

    def _is_within_reservation(self, spec: RequestSpec, held: Counter[str]) -> bool:
        tier = self.batch.shares.tier_of(spec)
        return held[tier] + spec.sampling.n <= self.batch.shares.reserved_slots(tier)

    def _lower(self, spec: RequestSpec, held: Counter[str]) -> int:
        """The borrowed slots of tiers with a lower priority."""
        shares, own = self.batch.shares, self.batch.shares.priority(spec)
        lower = (tier.name for tier in shares.qos.tiers if tier.priority > own)
        return sum(max(0, held[tier] - shares.reserved_slots(tier)) for tier in lower)

    def _all_taken(self, spec: RequestSpec, held: Counter[str]) -> RefusalReason:
        others = self.batch.shares.others_below_share(self.batch.shares.tier_of(spec), held)
        return RefusalReason.TIER_SHARE_EXHAUSTED if others else RefusalReason.SLOTS_EXHAUSTED

    def _breaks_tpot(self, spec: RequestSpec, sequences: int) -> bool:
        if spec.tpot_s is None or self.batch.times is None:
            return False
        coming = [spec, *self.reservations.specs()]
        others_s = strictest_kept_s(self._asked_by_others(), self.batch.times)
        strictest_s = spec.tpot_s if others_s is None else min(spec.tpot_s, others_s)
        kv_tokens = sum(s.context_tokens * s.sampling.n for s in coming)
        kv_tokens += sum(sequence.length for sequence in self._here())
        together = min(sequences + spec.sampling.n, self.batch.shares.slots)
        try:
            step_s = self.batch.times.step_s(decode_work(together, kv_tokens))
        except NotCovered:
            return False
        return step_s > TPOT_MARGIN * strictest_s

    def _asked_by_others(self) -> Iterator[tuple[float | None, int]]:
        """(time per token, context)"""
        yield from ((spec.tpot_s, spec.context_tokens) for spec in self.reservations.specs())
        yield from ((sequence.spec.tpot_s, sequence.length) for sequence in self._here())

    # --- blocks ---------------------------------------------------------------------------------

    def may_reclaim(self, spec: RequestSpec, *, displaced: bool = False) -> bool:
        """Whether it may have blocks of borrowers, and they would be enough."""
        if not displaced and not self._is_within_reservation(spec, self.held()):
            return False
        tables = self.batch.tables
        borrowed_tokens = sum(tables.capacity(s.holder) for s in self._borrowers(spec))
        free_tokens = tables.free_blocks * tables.layout.block_size
        return spec.context_tokens < free_tokens + borrowed_tokens

    def try_reclaim(self, spec: RequestSpec) -> bool:
        """Takes the blocks of a borrower, between two steps."""
        assert not self.batch.running_set.on_device, "a step is on the device"
        for sequence in self._borrowers(spec):
            self.batch.running_set.preempt_for_blocks(sequence)
            return True
        return False

    def _borrowers(self, spec: RequestSpec) -> Iterator[Sequence]:
        """Whose blocks the request may have: beyond its tier's reservation those of lower tiers."""
        tables, lookup, shares = self.batch.tables, self.batch.lookup, self.batch.shares
        own = self._is_within_reservation(spec, self.held())
        for sequence in shares.least_protected_first(self._here()):
            if not own and shares.priority(sequence.spec) <= shares.priority(spec):
                continue
            if sequence.holder in tables and not lookup.is_fetching(sequence.holder):
                yield sequence
