"""Which blocks that a worker offers the host tier takes. Pure; runs in the pool node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.hashes import BlockHash
from kvpool.pool.fetches import Fetches
from kvpool.pool.messages import ChainBlock
from kvpool.pool.stores import Stores
from kvpool.tiers.disk_tier import DiskTier
from kvpool.tiers.tier_blocks import TierBlocks


@dataclass(frozen=True, slots=True)
class Storable:
    host: TierBlocks
    disk: DiskTier
    stores: Stores
    fetches: Fetches

    def choose(self, blocks: Sequence[ChainBlock]) -> list[int]:
        """The indices of those that aren't here nor coming, and have a parent that is."""
        chosen: dict[BlockHash, int] = {}
        for index, block in enumerate(blocks):
            is_new = block.hash not in chosen and self._is_needed(block)
            if is_new and self._has_parent(block, chosen):
                chosen[block.hash] = index
        return list(chosen.values())

    def _is_needed(self, block: ChainBlock) -> bool:
        if self.stores.is_coming(block) or self.disk.is_coming(block.hash):
            return False
        if not self.host.is_spoiled(block.hash):
            return block.hash not in self.host
        is_same = self.host.parent(block.hash) == block.parent
        return is_same and not self.fetches.is_reading(block.hash)

    def _has_parent(self, block: ChainBlock, chosen: dict[BlockHash, int]) -> bool:
        parent = block.parent
        if parent is None or parent in chosen or parent in self.host:
            return True
        return self.stores.is_parent_coming(block) or self.disk.is_coming(parent)
