"""What a pool node tells the directory: batches of blocks that came and went. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvpool.block_origins import BlockOrigins
from kvpool.hashes import BlockHash
from kvpool.pool.events import TellWorker
from kvpool.pool.messages import BlocksChanged, PoolTier
from kvpool.tiers.tier_blocks import TierBlocks
from kvrelay.types import Incarnation


class Changes:
    """Each listener hears first all that there is, then every change, in order."""

    def __init__(self, origins: BlockOrigins) -> None:
        self._origins = origins
        self._listeners: dict[Incarnation, None] = {}
        # tier |-> block |-> whether it is there now
        self._pending: dict[PoolTier, dict[BlockHash, bool]] = {tier: {} for tier in PoolTier}
        self._greetings: list[TellWorker] = []

    def join(self, worker: Incarnation, *, host: TierBlocks, disk: TierBlocks) -> None:
        self._listeners[worker] = None
        for tier, blocks in ((PoolTier.HOST, host), (PoolTier.DISK, disk)):
            held = tuple(block_hash for block_hash in blocks if blocks.serves(block_hash))
            if held:
                message = BlocksChanged(tier=tier, stored=held)
                self._greetings.append(TellWorker(worker=worker, message=message))

    def leave(self, worker: Incarnation) -> None:
        self._listeners.pop(worker, None)

    def stored(self, tier: PoolTier, hashes: Iterable[BlockHash]) -> None:
        hashes = tuple(hashes)
        self._origins.came(tier, hashes)
        self._note(tier, hashes, there=True)

    def removed(self, tier: PoolTier, hashes: Iterable[BlockHash]) -> None:
        hashes = tuple(hashes)
        self._origins.went(tier, hashes)
        self._note(tier, hashes, there=False)

    def _note(self, tier: PoolTier, hashes: Iterable[BlockHash], *, there: bool) -> None:
        if self._listeners:
            pending = self._pending[tier]
            for block_hash in hashes:
                pending[block_hash] = there

    def flush(self) -> list[TellWorker]:
        """What is new since the last call."""
        messages, self._greetings = self._greetings, []
        for tier, pending in self._pending.items():
            if pending:
                message = BlocksChanged(
                    tier=tier,
                    stored=tuple(block_hash for block_hash, there in pending.items() if there),
                    removed=tuple(block_hash for block_hash, there in pending.items() if not there),
                )
                messages += [TellWorker(worker=w, message=message) for w in self._listeners]
                pending.clear()
        return messages
