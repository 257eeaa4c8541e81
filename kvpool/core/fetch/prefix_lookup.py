"""Finds all KV of a sequence's prefix: on this worker, in a pool, or at a peer. Pure.

A sequence whose prefix is being fetched holds its blocks and waits for Restored.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.client_events import (
    NodeEvent,
    NodeOrder,
    OfferConfirmed,
    OfferSettled,
)
from kvpool.core.fetch.cost import RestoreCost
from kvpool.core.fetch.fetches import LEFT, FetchState, PrefixFetches, Restored
from kvpool.core.fetch.peer_pull import PeerSource, PullEvent, PullGrants
from kvpool.core.fetch.pool_nodes import PoolNodes
from kvpool.core.fetch.pool_sources import OwnPoolSource, RemotePoolSource
from kvpool.core.fetch.pool_stores import PoolStores
from kvpool.core.fetch.write_behind import WriteBehind
from kvpool.core.layout.hashes import BlockHashes, FullNames
from kvrelay.messages import PrefixSource
from kvrelay.types import PrefixOrigin

log = logging.getLogger(__name__)

AHEAD = "ahead"
"""The side of holders whose prefix is fetched before it is opened."""


class PoolUse:
    """A worker's use of pools: it fetches from that of its host and those of other hosts, and
    stores in that of its host."""

    def __init__(
        self,
        tables: BlockTables,
        cost: RestoreCost,
        stores: PoolStores | None = None,
        *,
        offers_at_once: bool = False,
    ) -> None:
        """`stores` None: with the usual limits."""
        self.nodes = PoolNodes(stores)
        self.own = OwnPoolSource(tables=tables, cost=cost, nodes=self.nodes)
        self.remote = RemotePoolSource(tables=tables, cost=cost, nodes=self.nodes)
        self.write_behind = WriteBehind(tables, offers_at_once)

    @property
    def declined_tokens(self) -> int:
        """Tokens that were in a pool, but were faster computed or fetched elsewhere."""
        return self.own.declined_tokens + self.remote.declined_tokens

    def offer(self, now_s: float, *, is_busy: bool = False) -> None:
        """What the worker has named. `is_busy`: a step is running."""
        offer = self.write_behind.offer(now_s, is_busy=is_busy)
        if offer is not None:
            self.nodes.stores.offer(offer, now_s)

    def take_commands(self) -> tuple[list[NodeOrder], list[OfferConfirmed]]:
        """Orders are to be executed in order."""
        orders: list[NodeOrder] = []
        confirmed: list[OfferConfirmed] = []
        for command in self.nodes.take_outbox():
            if isinstance(command, OfferSettled):
                self.write_behind.settled(command.offer)
            elif isinstance(command, OfferConfirmed):
                self.write_behind.confirmed(command.offer)
                confirmed.append(command)
            else:
                orders.append(command)
        return orders, confirmed

    def validate(self, fetches: PrefixFetches) -> None:
        """A fetch waits only for nodes that may answer it."""
        self.nodes.validate()
        for fetch in fetches:
            if fetch.source in (self.own, self.remote) and fetch.state is not FetchState.COPYING:
                assert self.nodes.may_answer(fetch.peer), f"{fetch.holder} waits for {fetch.peer}"


@dataclass(slots=True, kw_only=True)
class PrefixLookup:
    """`pool` None: no pool is used. `peers` and `grants` are None if peers neither give nor get
    prefixes. `origins` counts where opened prefixes came from."""

    tables: BlockTables
    cost: RestoreCost
    pool: PoolUse | None = None
    peers: PeerSource | None = None
    grants: PullGrants | None = None
    origins: dict[PrefixOrigin, int] = field(default_factory=lambda: dict.fromkeys(PrefixOrigin, 0))
    fetches: PrefixFetches = field(init=False)

    def __post_init__(self) -> None:
        self.fetches = PrefixFetches(
            tables=self.tables,
            cost=self.cost,
            own_pool=None if self.pool is None else self.pool.own,
            remote_pools=None if self.pool is None else self.pool.remote,
            peers=self.peers,
        )

    def try_open(
        self,
        holder: Holder,
        tokens: int,
        *,
        hashes: FullNames,
        ahead_tokens: int,
        now_s: float,
        hint: PrefixSource | None = None,
    ) -> int | None:
        """Like `BlockTables.try_open`; afterwards the sequence may be `fetching`. `hint`: who may
        have more blocks."""
        found = self.tables.try_open(
            holder, tokens, hashes=hashes, ahead_tokens=ahead_tokens, now_s=now_s
        )
        if found is None:
            return None
        if not self._try_fetch(holder, hashes, found, hint, now_s):
            self._ended(Restored.found_here(holder, found))
        return found

    def _try_fetch(
        self,
        holder: Holder,
        names: FullNames,
        found: int,
        hint: PrefixSource | None,
        now_s: float,
    ) -> bool:
        if self.pool is None and hint is None:
            return False
        here = found // self.tables.layout.block_size
        return self.fetches.begin(holder, names.hashes(), here, hint, now_s)

    def fetch_ahead(
        self, holder: Holder, names: FullNames, hint: PrefixSource | None, now_s: float
    ) -> bool:
        """Fetches what this worker lacks of a prefix that will be opened later. It is held
        meanwhile. True: the holder waits for Restored; else it holds nothing."""
        here = self.tables.keep_prefix(holder, names, now_s=now_s)
        if self.fetches.begin(holder, names.hashes(), here, hint, now_s):
            return True
        self.tables.release(holder)
        return False

    def is_fetching(self, holder: Holder) -> bool:
        """None of the sequence's blocks may be used or freed."""
        return holder in self.fetches

    def leave(self, holder: Holder) -> bool:
        """The sequence is over. True: its blocks must stay until Restored."""
        return self.fetches.drop(holder)

    def stored_blocks(self, hashes: BlockHashes) -> int:
        """How many of these blocks, from the first on, the pool has taken or won't take."""
        if self.pool is None:
            return len(hashes)
        return self.pool.write_behind.settled_blocks(hashes)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Its time, to compare fetching with."""
        self.cost.computed(tokens, seconds)

    def on_node(self, event: NodeEvent, now_s: float) -> list[Restored]:
        assert self.pool is not None
        return self._all_ended(self.pool.nodes.handle(event, self.fetches, now_s))

    def on_peer(self, event: PullEvent, now_s: float) -> list[Restored]:
        if self.peers is None:
            return []
        return self._all_ended(self.peers.handle(event, self.fetches, now_s))

    def expire(self, now_s: float) -> list[Restored]:
        ended = [] if self.pool is None else self.pool.nodes.expire(self.fetches, now_s)
        return self._all_ended([*ended, *self.fetches.expire(now_s)])

    def _all_ended(self, ended: list[Restored]) -> list[Restored]:
        for restored in ended:
            if restored.holder.side == LEFT:
                self.tables.release(restored.holder)
        return [self._ended(one) for one in ended if one.holder.side != LEFT]

    def _ended(self, restored: Restored) -> Restored:
        """All KV that could be fetched is now in the holder's blocks."""
        self.origins[restored.origin] += restored.holder.side != AHEAD
        log.debug("%s: %d tokens, %s", restored.holder, restored.tokens, restored.origin)
        return restored

    def validate(self) -> None:
        self.fetches.validate()
        if self.pool is not None:
            self.pool.validate(self.fetches)
