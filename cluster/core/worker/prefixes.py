"""Prefixes that a worker fetches from pools and peers, and those that peers fetch from it."""

from __future__ import annotations

from cluster.core.worker.events import AskPool, PoolAnswer
from kvpool.core.fetch.client_events import OfferSettled, PrefixFound, SeekPrefix
from kvpool.core.fetch.openings import Openings
from kvpool.core.fetch.peer_pull import PullEvent, PullGrants
from kvpool.core.fetch.pool_fetch import Restored
from kvpool.core.layout.hashes import NO_NAMES
from kvpool.core.transfer.commands import FromPeer, PeerLost, SendPeer
from kvpool.core.transfer.pull import PullBlocks, PullRead, PullWanted
from kvrelay.types import RequestKey

PrefixOutcome = Restored | OfferSettled
"""What schedulers hear of it."""


class PrefixExchange:
    """With `confirms` the schedulers hear that an offer is settled once the pool node can be asked
    for it. The node hears what one worker says in order. So the answer to an empty question, asked
    behind the store, tells."""

    def __init__(self, openings: Openings, *, confirms: bool) -> None:
        self._openings = openings
        self._confirms = confirms
        self._confirming: dict[RequestKey, int] = {}  # question |-> offer
        self._questions: list[AskPool] = []
        self.answers: list[SendPeer] = []  # to what peers ask
        self.pulls = openings.pulls
        self.uses_pools = openings.write_behind is not None

    # --- pools ----------------------------------------------------------------------------------

    def answered(self, event: PoolAnswer, now_s: float) -> list[PrefixOutcome]:
        match event:
            case OfferSettled(offer=offer):
                self._settled(offer)
                return []
            case PrefixFound(key=key) if key in self._confirming:
                offer = self._confirming.pop(key)
                self._confirmed(offer)
                return [OfferSettled(offer=offer)]
            case _:
                restored = self._openings.answer(event, now_s)
                return [] if restored is None else [restored]

    def _settled(self, offer: int) -> None:
        assert self._openings.write_behind is not None
        self._openings.write_behind.settled(offer)
        if not self._confirms:
            self._confirmed(offer)
            return
        key = RequestKey(f"offer-{offer}", 0)
        self._confirming[key] = offer
        self._questions.append(SeekPrefix(key=key, hashes=NO_NAMES))

    def _confirmed(self, offer: int) -> None:
        assert self._openings.write_behind is not None
        self._openings.write_behind.confirmed(offer)

    def take_questions(self, now_s: float) -> list[AskPool]:
        """Questions of the worker's sequences, and what it has named since the last call."""
        assert self._openings.write_behind is not None
        questions, self._questions = self._questions, []
        questions += self._openings.take_outbox()
        offer = self._openings.write_behind.offer(now_s)
        return questions if offer is None else [*questions, offer]

    # --- peers ----------------------------------------------------------------------------------

    def pulled(self, event: PullEvent, now_s: float) -> list[Restored]:
        grants = self._openings.grants
        if grants is not None:
            self.answers += self._grant(grants, event, now_s)
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

    def expire(self, now_s: float) -> list[Restored]:
        if self._openings.grants is not None:
            self._openings.grants.expire(now_s)
        return self._openings.expire(now_s)

    def take_commands(self) -> list[SendPeer | PullBlocks]:
        """To be executed in order."""
        answers, self.answers = self.answers, []
        return [*answers, *self._openings.take_pulls()]
