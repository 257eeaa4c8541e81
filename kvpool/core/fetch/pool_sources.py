"""Fetches prefixes from pool nodes: that of this host, and those of other hosts. Pure.

Fetched blocks are named here, and so stored in the pool of this host too. Hot blocks end up in all
pools that are asked for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.cost import Rate, RestoreCost
from kvpool.core.fetch.fetches import Fetch
from kvpool.core.fetch.pool_nodes import PoolNodes
from kvrelay.messages import PrefixSource
from kvrelay.types import PrefixOrigin


@dataclass(slots=True, kw_only=True)
class OwnPoolSource:
    """`sought_tokens` were asked for. `declined_tokens` were in the pool, but faster computed than
    fetched."""

    tables: BlockTables
    cost: RestoreCost
    nodes: PoolNodes
    patience_s: float = 5.0
    sought_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    declined_tokens: int = 0
    whole_blocks: bool = True

    def seek(self, fetch: Fetch) -> bool:
        self.sought_tokens += (len(fetch.hashes) - fetch.here) * self.tables.layout.block_size
        return self.nodes.seek(fetch)

    def choose(self, host_blocks: int, disk_blocks: int) -> int:
        """How many of these to fetch."""
        chosen = self.cost.fetches(host_blocks, disk_blocks)
        declined = host_blocks + disk_blocks - chosen
        self.declined_tokens += declined * self.tables.layout.block_size
        return chosen

    def ask(self, fetch: Fetch, now_s: float) -> bool:
        return _try_want(self.nodes, self.tables, fetch, now_s)

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
    nodes: PoolNodes
    patience_s: float = 5.0
    tokens: int = 0
    declined_tokens: int = 0
    whole_blocks: bool = True

    def way(self, hint: PrefixSource) -> Rate:
        return self.cost.remote(hint.peer)

    def declined(self, blocks: int) -> None:
        self.declined_tokens += blocks * self.tables.layout.block_size

    def ask(self, fetch: Fetch, now_s: float) -> bool:
        assert fetch.hint is not None
        is_linked = self.nodes.try_link(fetch.hint, now_s)
        return is_linked and _try_want(self.nodes, self.tables, fetch, now_s)

    def fetched(self, fetch: Fetch, blocks: int, now_s: float) -> PrefixOrigin:
        self.cost.fetched(fetch.peer, blocks, now_s - fetch.began_s)
        self.tokens += blocks * self.tables.layout.block_size
        return PrefixOrigin.REMOTE


def _try_want(nodes: PoolNodes, tables: BlockTables, fetch: Fetch, now_s: float) -> bool:
    """Groups with a window need all fetched blocks until they are there."""
    if not tables.try_grow(fetch.holder, fetch.end * tables.layout.block_size, now_s=now_s):
        return False
    nodes.want(fetch)
    return True
