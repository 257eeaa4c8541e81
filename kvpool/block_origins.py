"""Whose blocks a pool node's tiers hold, and since when. Pure.

Labels come with the blocks (kvpool.tenants); what was on disk before this life has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvpool.hashes import BlockHash
from kvpool.pool.messages import ChainBlock, PoolTier
from kvpool.tenants import TenantBlocks, most_of

Since = dict[BlockHash, float]
"""In the order of time."""


@dataclass(slots=True)
class BlockOrigins:
    """`now_s`: of the event that is being handled. A block on its way between tiers is in none, so
    labels outlive their blocks, up to as many again and `spare`."""

    now_s: float = 0.0
    spare: int = 4096
    _labels: dict[BlockHash, str] = field(default_factory=dict)
    # tier |-> label |-> its blocks, since when they are there
    _held: dict[PoolTier, dict[str, Since]] = field(
        default_factory=lambda: {tier: {} for tier in PoolTier}
    )

    def labelled(self, blocks: Iterable[ChainBlock]) -> None:
        """They are about to come. What is nobody's in one tier is so in the other."""
        self._forget_some()
        for block in blocks:
            if block.tenant and not self._is_nobodys(block.hash):
                self._labels[block.hash] = block.tenant

    def came(self, tier: PoolTier, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            of_label = self._held[tier].setdefault(self._labels.get(block_hash, ""), {})
            of_label[block_hash] = self.now_s

    def went(self, tier: PoolTier, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            label = self._labels.get(block_hash, "")
            of_label = self._held[tier].get(label, {})
            of_label.pop(block_hash, None)
            if not of_label:
                self._held[tier].pop(label, None)

    def _forget_some(self) -> None:
        tiers = [since_s for of_tier in self._held.values() for since_s in of_tier.values()]
        if len(self._labels) <= 2 * sum(map(len, tiers)) + self.spare:
            return
        held = set().union(*tiers)
        self._labels = {name: label for name, label in self._labels.items() if name in held}

    def _is_nobodys(self, block_hash: BlockHash) -> bool:
        return any(block_hash in held.get("", ()) for held in self._held.values())

    def cached(self, tier: PoolTier, now_s: float) -> list[TenantBlocks]:
        """By label, those with the most blocks."""
        return most_of(self._of(tier, now_s))

    def _of(self, tier: PoolTier, now_s: float) -> Iterator[TenantBlocks]:
        for label, since_s in self._held[tier].items():
            oldest_s, newest_s = next(iter(since_s.values())), next(reversed(since_s.values()))
            yield TenantBlocks(
                tenant=label,
                blocks=len(since_s),
                oldest_s=now_s - oldest_s,
                newest_s=now_s - newest_s,
            )

    def validate(self) -> None:
        """What is held is held under the label that it is known by."""
        for of_tier in self._held.values():
            for label, since_s in of_tier.items():
                assert since_s, f"{label!r} has no blocks"
                assert all(self._labels.get(name, "") == label for name in since_s), label
