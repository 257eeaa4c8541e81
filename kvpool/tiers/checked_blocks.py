"""The host tier's blocks with their checksums, and what routers are told of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvpool.hashes import BlockHash
from kvpool.pool.changes import Changes
from kvpool.pool.messages import PoolTier
from kvpool.tiers.tier_blocks import PoolPlace, TierBlocks


class CheckedBlocks:
    """`checksums[block]` is the xxh3_64 that its bytes must have."""

    def __init__(self, tier: TierBlocks, changes: Changes) -> None:
        self.tier = tier
        self.checksums: dict[BlockHash, int] = {}
        self._changes = changes

    def room(self, count: int, *, below: Iterable[BlockHash | None]) -> tuple[PoolPlace, ...]:
        """Up to `count` reserved places."""
        room = self.tier.reserve(count, below=below)
        for block_hash in room.evicted:
            del self.checksums[block_hash]
        self._changes.removed(PoolTier.HOST, room.evicted)
        return room.places

    def adopt(
        self,
        parent: BlockHash | None,
        run: Sequence[tuple[BlockHash, PoolPlace]],
        checksums: Mapping[BlockHash, int],
    ) -> list[BlockHash]:
        """A chain below `parent` is readable from now on; the hashes that are new."""
        new = self.tier.adopt(parent, run)
        self.checksums.update((block_hash, checksums[block_hash]) for block_hash in new)
        self._changes.stored(PoolTier.HOST, new)
        return new

    def spoil(self, damaged: Iterable[BlockHash]) -> None:
        gone = [block_hash for block_hash in damaged if self.tier.spoil(block_hash)]
        self._changes.removed(PoolTier.HOST, gone)

    def validate(self) -> None:
        self.tier.validate()
        assert self.checksums.keys() == set(self.tier)
