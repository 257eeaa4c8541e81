"""Which sequences of a decode worker go before which: tiers' shares of its places. Pure.

Of a tier's sequences the oldest are its own, as many as its share of the places; others sit on
places that are lent to it. Own ones go first; then by priority; then by arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from decode_worker.sequence import Sequence
from kvrelay.qos import ONE_TIER, QosTiers
from kvrelay.types import RequestSpec


@dataclass(slots=True, kw_only=True)
class Standing:
    """`places` are those of the worker; without tiers all sequences stand alike."""

    places: int
    qos: QosTiers = ONE_TIER
    _own: dict[str, int] = field(init=False)  # tier |-> places that are always its
    _priority: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        tiers = self.qos.tiers
        self._own = {tier.name: tier.own_places(self.places) for tier in tiers}
        self._priority = {tier.name: tier.priority for tier in tiers}

    def tier_of(self, spec: RequestSpec) -> str:
        return spec.qos_tier if spec.qos_tier in self._own else self.qos.default

    @property
    def any_own(self) -> bool:
        return any(self._own.values())

    def own_places(self, tier: str) -> int:
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
