"""Prefixes that a worker fetches from pools and peers, and those that peers fetch from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvpool.core.fetch.client_events import (
    ClientCommand,
    NodeEvent,
    NodeOrder,
    OfferConfirmed,
    OfferSettled,
    PoolAnswer,
)
from kvpool.core.fetch.fetches import Restored
from kvpool.core.fetch.peer_pull import PullEvent, PullGrants
from kvpool.core.fetch.pool_nodes import PoolNodes
from kvpool.core.fetch.prefix_lookup import PrefixLookup
from kvpool.core.transfer.commands import FromPeer, PeerLost, SendPeer
from kvpool.core.transfer.pull import PullBlocks, PullRead, PullWanted

PrefixOutcome = Restored | OfferConfirmed
"""What schedulers hear of it."""


class PrefixExchange:
    """`nodes` None: no pool is used. `outbox` holds commands to be executed, in order."""

    def __init__(self, lookup: PrefixLookup, nodes: PoolNodes | None) -> None:
        self._lookup = lookup
        self.nodes = nodes
        self.peers = lookup.peers
        self.outbox: list[NodeOrder | SendPeer] = []

    # --- pools ----------------------------------------------------------------------------------

    def ask_pools(self, now_s: float, *, is_busy: bool) -> list[PrefixOutcome]:
        """Questions of the worker's sequences, and what it has named. `is_busy`: a step runs."""
        assert self.nodes is not None and self._lookup.pool is not None
        outcomes: list[PrefixOutcome] = []
        while questions := self._lookup.pool.take_questions(now_s, is_busy=is_busy):
            for question in questions:
                outcomes += self._answered(self.nodes.ask(question, now_s), now_s)
        return outcomes

    def on_node(self, event: NodeEvent, now_s: float) -> list[PrefixOutcome]:
        assert self.nodes is not None
        return self._answered(self.nodes.handle(event, now_s), now_s)

    def _answered(self, commands: Iterable[ClientCommand], now_s: float) -> list[PrefixOutcome]:
        """Orders wait in the outbox."""
        outcomes: list[PrefixOutcome] = []
        for command in commands:
            if isinstance(command, PoolAnswer):
                outcomes += self._answer(command, now_s)
            else:
                self.outbox.append(command)
        return outcomes

    def _answer(self, answer: PoolAnswer, now_s: float) -> Sequence[PrefixOutcome]:
        assert self._lookup.pool is not None
        match answer:
            case OfferSettled(offer=offer):
                self._lookup.pool.write_behind.settled(offer)
                return []
            case OfferConfirmed(offer=offer):
                self._lookup.pool.write_behind.confirmed(offer)
                return [answer]
            case _:
                return self._lookup.on_pool_answer(answer, now_s)

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
        if self.nodes is not None:
            outcomes += self._answered(self.nodes.tick(now_s), now_s)
        return outcomes

    def take_commands(self) -> list[NodeOrder | SendPeer | PullBlocks]:
        """To be executed in order."""
        commands, self.outbox = self.outbox, []
        return [*commands, *(() if self.peers is None else self.peers.take_outbox())]

    def validate(self) -> None:
        self._lookup.fetches.validate()
        if self.nodes is not None:
            self.nodes.validate()


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
