"""Prefixes on their way from a pool node into this worker's blocks. Pure.

    begin --SeekPrefix--> asked --PrefixFound--> fetching --PrefixFetched--> Restored
                                      `-- nothing there, or computing is faster --> Restored

A sequence waits for its prefix with all its blocks held; every `begin` ends in one Restored, also
when the node is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpool.hashes import BlockHash
from kvpool.holder import Holder
from kvpool.holding import places
from kvpool.pool.client_events import DropPrefix, PrefixFetched, PrefixFound, SeekPrefix, WantPrefix
from kvpool.tables import BlockTables
from kvpool.tiers.restore_cost import RestoreCost
from kvrelay.types import PrefixOrigin, RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The KV of the first `tokens` tokens is in the holder's blocks. `origin`: of what was fetched
    last, if anything was."""

    holder: Holder
    tokens: int
    origin: PrefixOrigin

    @classmethod
    def found_here(cls, holder: Holder, tokens: int) -> Restored:
        """Nothing was fetched."""
        origin = PrefixOrigin.DEVICE if tokens else PrefixOrigin.COMPUTED
        return cls(holder=holder, tokens=tokens, origin=origin)


@dataclass(slots=True, kw_only=True)
class _Restore:
    holder: Holder
    hashes: tuple[BlockHash, ...]
    here: int  # blocks
    host: int = 0
    disk: int = 0
    asked_s: float = 0.0
    dropped: bool = False


@dataclass(slots=True, kw_only=True)
class Restores:
    """`declined_tokens` were there, but faster computed than fetched."""

    tables: BlockTables
    cost: RestoreCost
    sought_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    declined_tokens: int = 0
    _by_key: dict[RequestKey, _Restore] = field(default_factory=dict)

    def __contains__(self, holder: Holder) -> bool:
        restore = self._by_key.get(holder.key)
        return restore is not None and restore.holder == holder

    def begin(
        self, holder: Holder, hashes: Sequence[BlockHash], found_tokens: int
    ) -> SeekPrefix | None:
        """Of the chain `hashes`, the first `found_tokens` are here. None: nothing to wait for."""
        here = found_tokens // self.tables.layout.block_size
        if len(hashes) <= here or holder.key in self._by_key:
            return None
        self._by_key[holder.key] = _Restore(holder=holder, hashes=tuple(hashes), here=here)
        self.sought_tokens += (len(hashes) - here) * self.tables.layout.block_size
        return SeekPrefix(key=holder.key, hashes=tuple(hashes))

    def drop(self, holder: Holder) -> DropPrefix | None:
        """The request is over. Its blocks stay held until Restored comes."""
        if holder not in self:
            return None
        self._by_key[holder.key].dropped = True
        return DropPrefix(key=holder.key)

    def here(self, key: RequestKey) -> int:
        """How many blocks one that waits had from the start."""
        return self._by_key[key].here

    def leave(self, key: RequestKey) -> None:
        """It asked, and goes on without the pool."""
        del self._by_key[key]

    def found(self, event: PrefixFound, now_s: float) -> WantPrefix | Restored | None:
        restore = self._by_key.get(event.key)
        if restore is None:
            return None
        restore.host = max(0, event.host_blocks - restore.here)
        restore.disk = max(0, event.host_blocks + event.disk_blocks - restore.here) - restore.host
        fetch = 0 if restore.dropped else self.cost.fetches(restore.host, restore.disk)
        self._decline(restore, fetch)
        if not fetch or not self._has_room(restore, restore.here + fetch, now_s):
            return self._end(restore, 0)
        restore.asked_s = now_s
        return self._want(restore, restore.here + fetch)

    def _decline(self, restore: _Restore, fetch: int) -> None:
        declined = restore.host + restore.disk - fetch
        self.declined_tokens += declined * self.tables.layout.block_size
        restore.disk = max(0, fetch - restore.host)
        restore.host = min(restore.host, fetch)

    def _has_room(self, restore: _Restore, end: int, now_s: float) -> bool:
        """Groups with a window need all the blocks that are fetched, until they are there."""
        tokens = end * self.tables.layout.block_size
        return self.tables.try_grow(restore.holder, tokens, now_s=now_s)

    def _want(self, restore: _Restore, end: int) -> WantPrefix:
        targets = places(self.tables.tables(restore.holder), range(restore.here, end))
        return WantPrefix(
            key=restore.holder.key,
            hashes=restore.hashes[:end],
            targets=targets,
            skip=restore.here,
        )

    def fetched(self, event: PrefixFetched, now_s: float) -> Restored | None:
        restore = self._by_key.get(event.key)
        if restore is None:
            return None
        if event.blocks == restore.host + restore.disk:
            self.cost.restored(restore.host, restore.disk, now_s - restore.asked_s)
        return self._end(restore, event.blocks)

    def _end(self, restore: _Restore, blocks: int) -> Restored:
        del self._by_key[restore.holder.key]
        size, host = self.tables.layout.block_size, min(blocks, restore.host)
        self.host_tokens += host * size
        self.disk_tokens += (blocks - host) * size
        if not blocks:
            return Restored.found_here(restore.holder, restore.here * size)
        end = restore.here + blocks
        self.tables.fill(restore.holder, restore.hashes[:end])
        origin = PrefixOrigin.DISK if blocks > host else PrefixOrigin.HOST
        return Restored(holder=restore.holder, tokens=end * size, origin=origin)

    def validate(self) -> None:
        """Whoever waits for a prefix holds its blocks."""
        assert all(restore.holder in self.tables for restore in self._by_key.values())
