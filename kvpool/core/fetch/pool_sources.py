"""Fetches prefixes from pool nodes: that of this host, and those of other hosts. Pure.

Questions go to the clients of the nodes, which copy and check the blocks. Fetched blocks are named
here, and so stored in the pool of this host too. Hot blocks end up in all pools that are asked for
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from kvpool.core.blocks.holding import places
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.client_events import (
    OWN_NODE,
    DropPrefix,
    PoolQuestion,
    SeekPrefix,
    WantPrefix,
)
from kvpool.core.fetch.cost import Rate, RestoreCost
from kvpool.core.fetch.fetches import Fetch
from kvrelay.messages import PrefixSource
from kvrelay.types import Incarnation, PrefixOrigin


@dataclass(slots=True, kw_only=True)
class OwnPoolSource:
    """`sought_tokens` were asked for. `declined_tokens` were in the pool, but faster computed than
    fetched."""

    tables: BlockTables
    cost: RestoreCost
    outbox: list[PoolQuestion]
    sought_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    declined_tokens: int = 0
    whole_blocks: bool = True
    patience_s: float = inf  # the clients of nodes give up

    def seek(self, fetch: Fetch) -> None:
        self.sought_tokens += (len(fetch.hashes) - fetch.here) * self.tables.layout.block_size
        self.outbox.append(SeekPrefix(key=fetch.holder.key, hashes=fetch.hashes))

    def choose(self, fetch: Fetch, host_blocks: int, disk_blocks: int) -> int:
        """How many of these to fetch."""
        chosen = 0 if fetch.dropped else self.cost.fetches(host_blocks, disk_blocks)
        declined = host_blocks + disk_blocks - chosen
        self.declined_tokens += declined * self.tables.layout.block_size
        return chosen

    def ask(self, fetch: Fetch, now_s: float) -> bool:
        if not _has_room(self.tables, fetch, now_s):
            return False
        self.outbox.append(_wanted(self.tables, fetch, OWN_NODE, ()))
        return True

    def drop(self, fetch: Fetch) -> bool:
        self.outbox.append(DropPrefix(key=fetch.holder.key))
        return True

    def fetched(self, fetch: Fetch, blocks: int, now_s: float) -> PrefixOrigin:
        size, host = self.tables.layout.block_size, min(blocks, fetch.host)
        self.host_tokens += host * size
        self.disk_tokens += (blocks - host) * size
        if fetch.here + blocks == fetch.end:
            self.cost.restored(host, blocks - host, now_s - fetch.began_s)
        return PrefixOrigin.DISK if blocks > host else PrefixOrigin.HOST


@dataclass(slots=True, kw_only=True)
class RemotePoolSource:
    """`declined_tokens` seemed to be there, but another source was faster."""

    tables: BlockTables
    cost: RestoreCost
    outbox: list[PoolQuestion]
    tokens: int = 0
    declined_tokens: int = 0
    whole_blocks: bool = True
    patience_s: float = inf  # the clients of nodes give up

    def way(self, hint: PrefixSource) -> Rate:
        return self.cost.remote(hint.peer)

    def declined(self, blocks: int) -> None:
        self.declined_tokens += blocks * self.tables.layout.block_size

    def ask(self, fetch: Fetch, now_s: float) -> bool:
        assert fetch.hint is not None
        if not _has_room(self.tables, fetch, now_s):
            return False
        wanted = _wanted(self.tables, fetch, fetch.hint.peer, fetch.hint.addresses)
        self.outbox.append(wanted)
        return True

    def drop(self, fetch: Fetch) -> bool:
        assert fetch.hint is not None
        self.outbox.append(DropPrefix(key=fetch.holder.key, node=fetch.hint.peer))
        return True

    def fetched(self, fetch: Fetch, blocks: int, now_s: float) -> PrefixOrigin:
        assert fetch.hint is not None
        self.cost.fetched(fetch.hint.peer, blocks, now_s - fetch.began_s)
        self.tokens += blocks * self.tables.layout.block_size
        return PrefixOrigin.REMOTE


def _has_room(tables: BlockTables, fetch: Fetch, now_s: float) -> bool:
    """Groups with a window need all fetched blocks until they are there."""
    return tables.try_grow(fetch.holder, fetch.end * tables.layout.block_size, now_s=now_s)


def _wanted(
    tables: BlockTables, fetch: Fetch, node: Incarnation, addresses: tuple[str, ...]
) -> WantPrefix:
    return WantPrefix(
        key=fetch.holder.key,
        hashes=fetch.hashes[: fetch.end],
        targets=places(tables.tables(fetch.holder), range(fetch.here, fetch.end)),
        skip=fetch.here,
        node=node,
        addresses=addresses,
    )
