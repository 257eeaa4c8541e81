"""Prefixes on their way from another host's pool node into this worker's blocks. Pure.

    begin --AskFar(WantPrefix)--> fetching --PrefixFetched--> Restored

Routers know what the node seemed to hold; it answers with what it has. A sequence waits with all
its blocks held; every `begin` ends in one Restored, also when the node is lost. What was fetched is
named here, and so written behind to the pool of this host too: hot blocks end up in all pools that
are asked for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpool.hashes import BlockHash
from kvpool.holder import Holder
from kvpool.holding import places
from kvpool.pool.client_events import DropPrefix, PrefixFetched, WantPrefix
from kvpool.tables import BlockTables
from kvpool.tiers.restore_cost import RestoreCost
from kvpool.tiers.restores import Restored
from kvrelay.messages import PrefixSource
from kvrelay.types import Incarnation, PrefixOrigin, RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class AskFar:
    """A question for the pool node `node`, which is at one of `addresses`."""

    node: Incarnation
    addresses: tuple[str, ...]
    question: WantPrefix | DropPrefix


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetch:
    """`here` are the chain's blocks that the worker has itself."""

    holder: Holder
    source: PrefixSource
    hashes: tuple[BlockHash, ...]
    here: int
    asked_s: float


@dataclass(slots=True, kw_only=True)
class FarFetches:
    """`tokens` were fetched, `declined_tokens` seemed there, but are had faster otherwise."""

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
        hashes: Sequence[BlockHash],
        source: PrefixSource,
        here: int,
        host_blocks: int = 0,
        disk_blocks: int = 0,
    ) -> bool:
        """As `Pulls.prefers`."""
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
        hashes: Sequence[BlockHash],
        here: int,
        source: PrefixSource,
        now_s: float,
    ) -> AskFar | None:
        """After `prefers`. None: no blocks are left for them."""
        end = min(len(hashes), source.blocks)
        tokens = end * self.tables.layout.block_size
        if holder.key in self._by_key or not self.tables.try_grow(holder, tokens, now_s=now_s):
            return None
        wanted = tuple(hashes[:end])
        self._by_key[holder.key] = _Fetch(
            holder=holder, source=source, hashes=wanted, here=here, asked_s=now_s
        )
        targets = places(self.tables.tables(holder), range(here, end))
        want = WantPrefix(key=holder.key, hashes=wanted, targets=targets, skip=here)
        return _ask(source, want)

    def drop(self, holder: Holder) -> AskFar:
        """The request is over. Its blocks stay held until Restored comes."""
        return _ask(self._by_key[holder.key].source, DropPrefix(key=holder.key))

    def fetched(self, event: PrefixFetched, now_s: float) -> Restored | None:
        """None: it is not one of these."""
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
        """Whoever waits for a prefix holds its blocks."""
        assert all(fetch.holder in self.tables for fetch in self._by_key.values())


def _ask(source: PrefixSource, question: WantPrefix | DropPrefix) -> AskFar:
    return AskFar(node=source.peer, addresses=source.addresses, question=question)
