"""Prefixes that a worker fetches from pools and peers, and those that peers fetch from it."""

from __future__ import annotations

from kvpool.core.fetch.client_events import NodeEvent, NodeOrder, OfferConfirmed
from kvpool.core.fetch.fetches import Restored
from kvpool.core.fetch.peer_pull import PullEvent, PullGrants
from kvpool.core.fetch.prefix_lookup import PrefixLookup
from kvpool.core.transfer.commands import FromPeer, PeerLost, SendPeer
from kvpool.core.transfer.pull import PullBlocks, PullRead, PullWanted

PrefixOutcome = Restored | OfferConfirmed
"""What schedulers hear of it."""


class PrefixExchange:
    """`pool` None: none is used. `outbox` holds commands to be executed, in order."""

    def __init__(self, lookup: PrefixLookup) -> None:
        self._lookup = lookup
        self.pool = lookup.pool
        self.peers = lookup.peers
        self.outbox: list[NodeOrder | SendPeer] = []

    # --- pools ----------------------------------------------------------------------------------

    def ask_pools(self, now_s: float, *, is_busy: bool) -> list[OfferConfirmed]:
        """Questions of the worker's sequences, and what it has named. `is_busy`: a step runs."""
        assert self.pool is not None
        self.pool.offer(now_s, is_busy=is_busy)
        return self._take_orders() if self.pool.nodes.outbox else []

    @property
    def stored(self) -> bool:
        """The pool has what is worth keeping."""
        return self.pool is None or self.pool.write_behind.idle

    def store_at_once(self) -> None:
        """From now on no block waits for others."""
        if self.pool is not None:
            self.pool.write_behind.at_once = True

    def on_node(self, event: NodeEvent, now_s: float) -> list[PrefixOutcome]:
        return [*self._lookup.on_node(event, now_s), *self._take_orders()]

    def _take_orders(self) -> list[OfferConfirmed]:
        assert self.pool is not None
        orders, confirmed = self.pool.take_commands()
        self.outbox += orders
        return confirmed

    # --- peers ----------------------------------------------------------------------------------

    def on_peer(self, event: PullEvent, now_s: float) -> list[Restored]:
        if self._lookup.grants is not None:
            self.outbox += _granted(self._lookup.grants, event, now_s)
        return self._lookup.on_peer(event, now_s)

    # --- all ------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[PrefixOutcome]:
        """Time has passed: leases and patience may have ended."""
        if self._lookup.grants is not None:
            self._lookup.grants.expire(now_s)
        outcomes: list[PrefixOutcome] = [*self._lookup.expire(now_s)]
        if self.pool is not None:
            outcomes += self._take_orders()
        return outcomes

    def take_commands(self) -> list[NodeOrder | SendPeer | PullBlocks]:
        """To be executed in order."""
        commands, self.outbox = self.outbox, []
        return [*commands, *(() if self.peers is None else self.peers.take_outbox())]

    def validate(self) -> None:
        self._lookup.validate()


def _granted(grants: PullGrants, event: PullEvent, now_s: float) -> list[SendPeer]:
    """What a peer is answered."""
    match event:
        case FromPeer(peer=peer, message=PullWanted() as wanted):
            granted = grants.wanted(peer, wanted, now_s)
            return [] if granted is None else [SendPeer(peer=peer, message=granted)]
        case FromPeer(peer=peer, message=PullRead() as read):
            return [SendPeer(peer=peer, message=grants.read(peer, read, now_s))]
        case PeerLost(peer=peer):
            grants.lost(peer)
    return []
