"""The host tier's blocks with their checksums, and what routers are told of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvpool.hashes import BlockHash
from kvpool.pool.changes import Changes
from kvpool.pool.messages import PoolTier
from kvpool.tiers.tier_blocks import PoolPlace, TierBlocks
from kvrelay.types import Incarnation


@dataclass(frozen=True, slots=True)
class Pin:
    hashes: tuple[BlockHash, ...]
    since_s: float


class CheckedBlocks:
    """`checksums[block]` is the xxh3_64 that its bytes must have."""

    def __init__(self, tier: TierBlocks, changes: Changes) -> None:
        self.tier = tier
        self.checksums: dict[BlockHash, int] = {}
        self._changes = changes
        # worker |-> last block of a pinned chain |-> the chain
        self._pins: dict[Incarnation, dict[BlockHash, Pin]] = {}

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

    def pins(self) -> Iterator[tuple[Incarnation, Pin]]:
        for worker, pins in self._pins.items():
            yield from ((worker, pin) for pin in pins.values())

    def pin(self, worker: Incarnation, hashes: tuple[BlockHash, ...], now_s: float) -> bool:
        """Keep the chain while the worker lives; False when it isn't here whole."""
        if not hashes or self.tier.match(hashes) < len(hashes):
            return False
        pins = self._pins.setdefault(worker, {})
        if hashes[-1] not in pins:
            self.tier.pin(hashes)
            pins[hashes[-1]] = Pin(hashes, now_s)
        return True

    def unpin(self, worker: Incarnation, hashes: tuple[BlockHash, ...]) -> None:
        pinned = self._pins.get(worker, {}).pop(hashes[-1], None) if hashes else None
        if pinned is not None:
            self.tier.unpin(pinned.hashes)

    def unpin_all(self, worker: Incarnation) -> None:
        for pin in self._pins.pop(worker, {}).values():
            self.tier.unpin(pin.hashes)

    def validate(self) -> None:
        self.tier.validate()
        assert self.checksums.keys() == set(self.tier)
