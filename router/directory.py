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

    At most `most_entries` (about 200 bytes each) are kept; what comes then is not.
    """

    most_entries: int = 4_000_000
    entries: int = 0
    pool_nodes: set[Incarnation] = field(default_factory=set)
    _held: dict[Incarnation, Tiers] = field(default_factory=dict)
    _reporters: dict[Incarnation, set[Incarnation]] = field(default_factory=dict)
    _addresses: dict[Incarnation, tuple[str, ...]] = field(default_factory=dict)
    _places: list[Incarnation | None] = field(default_factory=list)  # bit |-> holder
    _bits: dict[Incarnation, int] = field(default_factory=dict)  # holder |-> 1 << its bit
    _holders: dict[bytes, int] = field(default_factory=dict)  # block |-> bits of who has it

    def changed(self, reporter: Incarnation, changes: BlockChanges) -> None:
        holder = changes.holder or reporter
        if changes.gone:
            self._forget(reporter, holder)
            return
        if holder not in self._held:
            self._add(holder, is_node=bool(changes.holder))
        self._reporters[holder].add(reporter)
        if changes.addresses:
            self._addresses[holder] = changes.addresses
        self._store(holder, changes)
        self._remove(holder, changes.tier, changes.removed)

    def _add(self, holder: Incarnation, *, is_node: bool) -> None:
        place = self._places.index(None) if None in self._places else len(self._places)
        self._places[place : place + 1] = [holder]
        self._bits[holder] = 1 << place
        self._held[holder] = {}
        self._reporters[holder] = set()
        if is_node:
            self.pool_nodes.add(holder)

    def _store(self, holder: Incarnation, changes: BlockChanges) -> None:
        blocks = self._held[holder].setdefault(changes.tier, set())
        before, bit, holders = len(blocks), self._bits[holder], self._holders
        stored = changes.stored[: max(0, self.most_entries - self.entries)]
        blocks.update(stored)
        for block in stored:
            holders[block] = holders.get(block, 0) | bit
        self.entries += len(blocks) - before

    def _remove(self, holder: Incarnation, tier: Tier, removed: Iterable[bytes]) -> None:
        tiers = self._held[holder]
        blocks = tiers[tier]
        others = [held for other, held in tiers.items() if other is not tier and held]
        for block in removed:
            if block not in blocks:
                continue
            blocks.remove(block)
            self.entries -= 1
            if not any(block in held for held in others):
                self._clear(block, self._bits[holder])

    def _clear(self, block: bytes, bit: int) -> None:
        left = self._holders[block] & ~bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]

    def lost(self, reporter: Incarnation) -> None:
        """What no other worker reports is gone with it."""
        for holder in [h for h, reporters in self._reporters.items() if reporter in reporters]:
            self._forget(reporter, holder)

    def _forget(self, reporter: Incarnation, holder: Incarnation) -> None:
        reporters = self._reporters.get(holder, set())
        reporters.discard(reporter)
        if reporters or holder not in self._held:
            return
        tiers, bit = self._held.pop(holder), self._bits.pop(holder)
        self.entries -= sum(map(len, tiers.values()))
        for block in set().union(*tiers.values()):
            self._clear(block, bit)
        self._places[bit.bit_length() - 1] = None
        self._reporters.pop(holder)
        self._addresses.pop(holder, None)
        self.pool_nodes.discard(holder)

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
        having, length = -1, 0
        for holders in map(self._holders.get, hashes):
            still = (holders or 0) & having
            if still != having:
                if length:
                    found |= dict.fromkeys(self._named(having & ~still), length)
                having = still
            if not having:
                return found
            length += 1
        return found | dict.fromkeys(self._named(having), length) if length else found

    def _named(self, bits: int) -> list[Incarnation]:
        digits = reversed(f"{bits:b}")
        return [
            holder
            for holder, digit in zip(self._places, digits, strict=False)
            if digit == "1" and holder is not None
        ]

    def validate(self) -> None:
        held = {holder: set().union(*tiers.values()) for holder, tiers in self._held.items()}
        entries = sum(len(blocks) for tiers in self._held.values() for blocks in tiers.values())
        assert entries == self.entries <= self.most_entries
        assert self._held.keys() == self._reporters.keys() == self._bits.keys()
        assert self._addresses.keys() | self.pool_nodes <= self._held.keys()
        assert all(self._reporters.values()), "a holder that no one reports"
        for block, bits in self._holders.items():
            assert {*self._named(bits)} == {h for h, blocks in held.items() if block in blocks}
        assert self._holders.keys() == set().union(*held.values())
