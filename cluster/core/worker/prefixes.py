"""Prefixes that a worker fetches from pools and peers, and those that peers fetch from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvpool.core.fetch.client_events import (
    ClientCommand,
    NodeEvent,
    NodeOrder,
    OfferConfirmed,
    OfferSettled,
    PoolAnswer,
    PoolQuestion,
)
from kvpool.core.fetch.openings import Openings
from kvpool.core.fetch.peer_pull import PullEvent, PullGrants
from kvpool.core.fetch.pool_fetch import Restored
from kvpool.core.fetch.pool_nodes import PoolNodes
from kvpool.core.transfer.commands import FromPeer, PeerLost, SendPeer
from kvpool.core.transfer.pull import PullBlocks, PullRead, PullWanted

PrefixOutcome = Restored | OfferConfirmed
"""What schedulers hear of it."""


class PrefixExchange:
    """`nodes` None: no pool is used."""

    def __init__(self, openings: Openings, nodes: PoolNodes | None) -> None:
        self._openings = openings
        self.outbox: list[NodeOrder | SendPeer] = []
        self.nodes = nodes
        self.pulls = openings.pulls

    # --- pools ----------------------------------------------------------------------------------

    def ask_pools(self, now_s: float) -> list[PrefixOutcome]:
        """Questions of the worker's sequences, and what it has named since the last call."""
        assert self.nodes is not None
        outcomes: list[PrefixOutcome] = []
        while questions := [*self._take_questions(now_s)]:
            for question in questions:
                outcomes += self._answered(self.nodes.ask(question, now_s), now_s)
        return outcomes

    def _take_questions(self, now_s: float) -> Iterator[PoolQuestion]:
        assert self._openings.write_behind is not None
        yield from self._openings.take_outbox()
        if (offer := self._openings.write_behind.offer(now_s)) is not None:
            yield offer

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

    def _answer(self, answer: PoolAnswer, now_s: float) -> list[PrefixOutcome]:
        assert self._openings.write_behind is not None
        match answer:
            case OfferSettled(offer=offer):
                self._openings.write_behind.settled(offer)
                return []
            case OfferConfirmed(offer=offer):
                self._openings.write_behind.confirmed(offer)
                return [answer]
            case _:
                restored = self._openings.answer(answer, now_s)
                return [] if restored is None else [restored]

    # --- peers ----------------------------------------------------------------------------------

    def pulled(self, event: PullEvent, now_s: float) -> list[Restored]:
        grants = self._openings.grants
        if grants is not None:
            self.outbox += self._grant(grants, event, now_s)
        return self._openings.pulled(event, now_s)

    @staticmethod
    def _grant(grants: PullGrants, event: PullEvent, now_s: float) -> list[SendPeer]:
        match event:
            case FromPeer(peer=peer, message=PullWanted() as wanted):
                return [SendPeer(peer=peer, message=grants.wanted(peer, wanted, now_s))]
            case FromPeer(peer=peer, message=PullRead() as read):
                return [SendPeer(peer=peer, message=grants.read(peer, read))]
            case PeerLost(peer=peer):
                grants.lost(peer)
        return []

    def tick(self, now_s: float) -> list[PrefixOutcome]:
        """Time has passed: leases and patience may have ended."""
        if self._openings.grants is not None:
            self._openings.grants.expire(now_s)
        outcomes: list[PrefixOutcome] = [*self._openings.expire(now_s)]
        if self.nodes is not None:
            outcomes += self._answered(self.nodes.tick(now_s), now_s)
        return outcomes

    def take_commands(self) -> list[NodeOrder | SendPeer | PullBlocks]:
        """To be executed in order."""
        commands, self.outbox = self.outbox, []
        return [*commands, *self._openings.take_pulls()]

    def validate(self) -> None:
        if self._openings.restores is not None:
            self._openings.restores.validate()
        if self.nodes is not None:
            self.nodes.validate()
