"""Fetches prefixes from pool nodes into this worker's blocks. Pure.

From the pool node of its own host:

    begin --SeekPrefix--> asked --PrefixFound--> fetching --PrefixFetched--> Restored
                                      `-- nothing there, or computing is faster --> Restored

From the pool node of another host:

    begin --WantPrefix--> fetching --PrefixFetched--> Restored

A sequence waits for its prefix with all its blocks held. Every `begin` ends in one Restored, also
when the node is lost.

Routers know roughly which blocks a remote node holds; the node answers with those it has. Fetched
blocks are named here, and so stored in the pool of this host too. Hot blocks end up in all pools
that are asked for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.core.blocks.holding import Holder, places
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.client_events import (
    DropPrefix,
    PrefixFetched,
    PrefixFound,
    SeekPrefix,
    WantPrefix,
)
from kvpool.core.fetch.cost import RestoreCost
from kvpool.core.layout.hashes import BlockHashes
from kvrelay.messages import PrefixSource
from kvrelay.types import PrefixOrigin, RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The KV of the first `tokens` tokens is in the holder's blocks. `origin`: the source of the
    last fetch, if there was one."""

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
    hashes: BlockHashes
    here: int  # blocks
    host: int = 0
    disk: int = 0
    asked_s: float = 0.0
    dropped: bool = False


@dataclass(slots=True, kw_only=True)
class Restores:
    """`declined_tokens` were in the pool, but faster computed than fetched."""

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

    def begin(self, holder: Holder, hashes: BlockHashes, found_tokens: int) -> SeekPrefix | None:
        """Of the chain `hashes`, the first `found_tokens` tokens are on this worker. None: nothing
        to wait for."""
        here = found_tokens // self.tables.layout.block_size
        if len(hashes) <= here or holder.key in self._by_key:
            return None
        self._by_key[holder.key] = _Restore(holder=holder, hashes=hashes, here=here)
        self.sought_tokens += (len(hashes) - here) * self.tables.layout.block_size
        return SeekPrefix(key=holder.key, hashes=hashes)

    def drop(self, holder: Holder) -> DropPrefix | None:
        """The request is over. Its blocks stay held until Restored comes."""
        if holder not in self:
            return None
        self._by_key[holder.key].dropped = True
        return DropPrefix(key=holder.key)

    def here(self, key: RequestKey) -> int:
        """Number of blocks that a waiting sequence had from the start."""
        return self._by_key[key].here

    def leave(self, key: RequestKey) -> None:
        """It has asked, and continues without the pool."""
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
        """Groups with a window need all fetched blocks until they are there."""
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
        """A sequence that waits for a prefix holds its blocks."""
        assert all(restore.holder in self.tables for restore in self._by_key.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetch:
    """`here` are the chain's blocks that the worker has itself."""

    holder: Holder
    source: PrefixSource
    hashes: BlockHashes
    here: int
    asked_s: float


@dataclass(slots=True, kw_only=True)
class RemoteFetches:
    """`tokens` were fetched. `declined_tokens` seemed to be there, but another source was
    faster."""

    tables: BlockTables
    cost: RestoreCost
    tokens: int = 0
    declined_tokens: int = 0
    _by_key: dict[RequestKey, _Fetch] = field(default_factory=dict)

    def __contains__(self, holder: Holder) -> bool:
        fetch = self._by_key.get(holder.key)
        return fetch is not None and fetch.holder == holder

    def prefers(
        self,
        hashes: BlockHashes,
        source: PrefixSource,
        here: int,
        host_blocks: int = 0,
        disk_blocks: int = 0,
    ) -> bool:
        """Like `Pulls.prefers`."""
        more = min(len(hashes), source.blocks) - here
        if more <= 0:
            return False
        way = self.cost.remote(source.peer)
        is_best = self.cost.prefers(way, more, host_blocks, disk_blocks)
        if is_best or self.cost.tries_again(way, more):
            return True
        self.declined_tokens += more * self.tables.layout.block_size
        return False

    def try_begin(
        self,
        holder: Holder,
        hashes: BlockHashes,
        here: int,
        source: PrefixSource,
        now_s: float,
    ) -> WantPrefix | None:
        """Call it after `prefers`. None: no blocks are left for the fetch."""
        end = min(len(hashes), source.blocks)
        tokens = end * self.tables.layout.block_size
        if holder.key in self._by_key or not self.tables.try_grow(holder, tokens, now_s=now_s):
            return None
        wanted = hashes[:end]
        self._by_key[holder.key] = _Fetch(
            holder=holder, source=source, hashes=wanted, here=here, asked_s=now_s
        )
        targets = places(self.tables.tables(holder), range(here, end))
        return WantPrefix(
            key=holder.key,
            hashes=wanted,
            targets=targets,
            skip=here,
            node=source.peer,
            addresses=source.addresses,
        )

    def drop(self, holder: Holder) -> DropPrefix:
        """The request is over. Its blocks stay held until Restored comes."""
        return DropPrefix(key=holder.key, node=self._by_key[holder.key].source.peer)

    def fetched(self, event: PrefixFetched, now_s: float) -> Restored | None:
        """None: it is not one of these fetches."""
        fetch = self._by_key.pop(event.key, None)
        if fetch is None:
            return None
        size, end = self.tables.layout.block_size, fetch.here + event.blocks
        if not event.blocks:
            return Restored.found_here(fetch.holder, end * size)
        self.cost.fetched(fetch.source.peer, event.blocks, now_s - fetch.asked_s)
        self.tokens += event.blocks * size
        self.tables.fill(fetch.holder, fetch.hashes[:end])
        return Restored(holder=fetch.holder, tokens=end * size, origin=PrefixOrigin.REMOTE)

    def validate(self) -> None:
        """A sequence that waits for a prefix holds its blocks."""
        assert all(fetch.holder in self.tables for fetch in self._by_key.values())
