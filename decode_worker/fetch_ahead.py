"""Fetches from the pool what a prefill worker has stored so far, while it computes the rest. Pure.

With `handoff: pool`. What comes is cached here, like any other block: the request finds it when it
joins the batch. Blocks are held only while they are fetched, and nobody is preempted for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.incoming import IncomingHandoff
from decode_worker.reservations import Reservations
from engine.core.step import Command
from kvpool.core.blocks.holding import Holder
from kvpool.core.fetch.fetches import Restored
from kvpool.core.fetch.prefix_lookup import AHEAD, PrefixLookup
from kvpool.core.transfer.messages import PrefixStored
from kvrelay.types import Incarnation


@dataclass(slots=True, kw_only=True)
class FetchAhead:
    """At most one fetch for each reservation; a reservation waits for its end."""

    lookup: PrefixLookup
    reservations: Reservations

    def stored(self, peer: Incarnation, told: PrefixStored, now_s: float) -> None:
        """Word for a request that is over changes nothing: its prefill worker hears at Commit."""
        incoming = self.reservations.find(told.key)
        if incoming is None or not incoming.is_from(peer):
            return
        self.reservations.leases.renew(told.key, now_s)
        self.reservations.begin(incoming, needs_blocks=False)
        incoming.stored_tokens = max(incoming.stored_tokens, told.tokens)
        if not incoming.in_flight:
            self._fetch(incoming, now_s)

    def _fetch(self, incoming: IncomingHandoff, now_s: float) -> None:
        if incoming.sought_tokens == incoming.stored_tokens:
            return
        incoming.sought_tokens = incoming.stored_tokens
        holder = Holder(AHEAD, incoming.key)
        names = incoming.names.full(incoming.stored_tokens)
        hint = incoming.message.prefix_source
        incoming.in_flight += self.lookup.fetch_ahead(holder, names, hint, now_s)

    def restored(self, event: Restored, now_s: float) -> list[Command]:
        """More may have been stored meanwhile."""
        self.lookup.tables.release(event.holder)
        incoming = self.reservations.landed(event.holder.key)
        if incoming is None:
            return []
        self._fetch(incoming, now_s)
        return self.reservations.complete(incoming)
