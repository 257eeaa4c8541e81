"""Who holds which block: the router's view, as workers report it. Pure.

Soft state: an entry that is missing or out of date costs a recomputation, never a wrong token,
for whoever is asked for a block answers by what it holds then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvrelay.messages import BlockChanges
from kvrelay.types import Incarnation, Tier

Tiers = dict[Tier, set[bytes]]


@dataclass(slots=True)
class Directory:
    """A holder is a worker or a host's pool node, which all workers of its host report.

    At most `most_entries` (about 100 bytes each) are kept; what comes then is not.
    """

    most_entries: int = 4_000_000
    entries: int = 0
    _held: dict[Incarnation, Tiers] = field(default_factory=dict)
    _reporters: dict[Incarnation, set[Incarnation]] = field(default_factory=dict)
    _addresses: dict[Incarnation, tuple[str, ...]] = field(default_factory=dict)

    def changed(self, reporter: Incarnation, changes: BlockChanges) -> None:
        holder = changes.holder or reporter
        if changes.gone:
            self._forget(reporter, holder)
            return
        self._reporters.setdefault(holder, set()).add(reporter)
        if changes.addresses:
            self._addresses[holder] = changes.addresses
        blocks = self._held.setdefault(holder, {}).setdefault(changes.tier, set())
        before = len(blocks)
        room = self.most_entries - self.entries
        blocks.update(changes.stored[: max(0, room)])
        blocks.difference_update(changes.removed)
        self.entries += len(blocks) - before

    def lost(self, reporter: Incarnation) -> None:
        """What no other worker reports is gone with it."""
        for holder in [h for h, reporters in self._reporters.items() if reporter in reporters]:
            self._forget(reporter, holder)

    def _forget(self, reporter: Incarnation, holder: Incarnation) -> None:
        reporters = self._reporters.get(holder, set())
        reporters.discard(reporter)
        if not reporters:
            self._reporters.pop(holder, None)
            self._addresses.pop(holder, None)
            self.entries -= sum(map(len, self._held.pop(holder, {}).values()))

    def addresses(self, holder: Incarnation) -> tuple[str, ...]:
        """Where workers of other hosts find a pool node; empty: they can't."""
        return self._addresses.get(holder, ())

    def is_reported(self, holder: Incarnation, reporter: Incarnation) -> bool:
        """Whether this worker uses the pool node `holder`."""
        return reporter in self._reporters.get(holder, ())

    def longest(self, hashes: Iterable[bytes]) -> dict[Incarnation, int]:
        """# holder |-> how many of the chain's first blocks it has, in any tier; only those with
        any. Takes no more of `hashes` than somebody has, and the one after that."""
        found: dict[Incarnation, int] = {}
        having = [(holder, [*tiers.values()]) for holder, tiers in self._held.items()]
        for length, block_hash in enumerate(hashes, 1):
            having = [one for one in having if any(block_hash in tier for tier in one[1])]
            if not having:
                break
            for holder, _ in having:
                found[holder] = length
        return found

    def validate(self) -> None:
        held = sum(len(blocks) for tiers in self._held.values() for blocks in tiers.values())
        assert held == self.entries <= self.most_entries
        assert self._held.keys() == self._reporters.keys()
        assert self._addresses.keys() <= self._held.keys()
        assert all(self._reporters.values()), "a holder that no one reports"
