"""Who holds which block: the router's view, as workers and pool nodes report it. Pure.

Soft state: an entry that is missing or out of date costs a recomputation, never a wrong token,
for whoever is asked for a block answers by what it holds then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvrelay.errors import PeerError
from kvrelay.messages import BlockChanges, PoolUpdate
from kvrelay.types import Incarnation, Tier

Tiers = dict[Tier, set[bytes]]


@dataclass(slots=True)
class Directory:
    """A holder is a worker or a host's pool node. `pool_nodes`: # node |-> its latest update.

    At most `most_entries` (about 200 bytes each) are kept; what comes then is not.
    """

    most_entries: int = 4_000_000
    entries: int = 0
    pool_nodes: dict[Incarnation, PoolUpdate] = field(default_factory=dict)
    _held: dict[Incarnation, Tiers] = field(default_factory=dict)
    _places: list[Incarnation | None] = field(default_factory=list)  # bit |-> holder
    _bits: dict[Incarnation, int] = field(default_factory=dict)  # holder |-> 1 << its bit
    _holders: dict[bytes, int] = field(default_factory=dict)  # block |-> bits of who has it

    def updated(self, update: PoolUpdate) -> None:
        """A pool node's stream begins with number 0. Raises PeerError, and has forgotten the node,
        when the update before this one is missing."""
        node = self.pool_nodes.get(update.node)
        expected = node.sequence + 1 if node is not None else 0
        if update.sequence != expected:
            self.lost(update.node)
        if update.sequence not in (0, expected):
            raise PeerError(f"update {update.sequence} came in the place of {expected}")
        self.pool_nodes[update.node] = replace(update, blocks=())
        for changes in update.blocks:
            self.changed(update.node, changes)

    def changed(self, holder: Incarnation, changes: BlockChanges) -> None:
        if holder not in self._held:
            self._add(holder)
        self._store(holder, changes)
        self._remove(holder, changes.tier, changes.removed)

    def _add(self, holder: Incarnation) -> None:
        place = self._places.index(None) if None in self._places else len(self._places)
        self._places[place : place + 1] = [holder]
        self._bits[holder] = 1 << place
        self._held[holder] = {}

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

    def lost(self, holder: Incarnation) -> None:
        """It may not have been there."""
        self.pool_nodes.pop(holder, None)
        if holder not in self._held:
            return
        tiers, bit = self._held.pop(holder), self._bits.pop(holder)
        self.entries -= sum(map(len, tiers.values()))
        for block in set().union(*tiers.values()):
            self._clear(block, bit)
        self._places[bit.bit_length() - 1] = None

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
        assert self._held.keys() == self._bits.keys()
        assert all(update.node == node for node, update in self.pool_nodes.items())
        for block, bits in self._holders.items():
            assert {*self._named(bits)} == {h for h, blocks in held.items() if block in blocks}
        assert self._holders.keys() == set().union(*held.values())
