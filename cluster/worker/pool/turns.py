"""The pool's part of a worker's loop: lookups and offers go out, their results come back.

Runs on the loop's thread.
"""

from __future__ import annotations

import time
from collections import deque

from cluster.worker.pool.side import PoolLinkEvent, PoolSide
from kvpool.core.fetch.client_events import (
    ClientTick,
    OfferSettled,
    PrefixFetched,
    PrefixFound,
    SeekPrefix,
)
from kvpool.core.fetch.openings import Openings
from kvpool.core.fetch.pool_fetch import Restored
from kvrelay.types import RequestKey

PoolOutcome = Restored | OfferSettled
"""Results for the schedulers."""


class PoolTurns:
    """`confirms`: schedulers learn that an offer is settled once the node can be asked for it. The
    node handles a worker's messages in order, so the answer to an empty lookup behind the store
    confirms the store."""

    def __init__(self, side: PoolSide, openings: Openings, *, confirms: bool) -> None:
        assert openings.write_behind is not None
        self._confirms = confirms
        self._confirming: dict[RequestKey, int] = {}
        self._side = side
        self._openings = openings
        self._write_behind = openings.write_behind

    def turn(self) -> list[PoolOutcome]:
        """Called after the worker's own events: sends their lookups, and offers the blocks that
        they have named."""
        outcomes = [
            one for question in self._openings.take_outbox() for one in self.handle(question)
        ]
        offer = self._write_behind.offer(time.monotonic())
        return outcomes if offer is None else [*outcomes, *self.handle(offer)]

    def tick(self) -> list[PoolOutcome]:
        return self.handle(ClientTick())

    def handle(self, event: PoolLinkEvent) -> list[PoolOutcome]:
        outcomes: list[PoolOutcome] = []
        events: deque[PoolLinkEvent] = deque([event])
        while events:
            for answer in self._side.handle(events.popleft()):
                match answer:
                    case OfferSettled(offer=offer):
                        self._write_behind.settled(offer)
                        if self._confirms:
                            events.append(self._question(offer))
                        else:
                            self._write_behind.confirmed(offer)
                    case PrefixFound(key=key) if key in self._confirming:
                        offer = self._confirming.pop(key)
                        self._write_behind.confirmed(offer)
                        outcomes.append(OfferSettled(offer=offer))
                    case PrefixFound() | PrefixFetched():
                        ended = self._openings.answer(answer, time.monotonic())
                        outcomes += [] if ended is None else [ended]
            events.extend(self._openings.take_outbox())
        return outcomes

    def _question(self, offer: int) -> SeekPrefix:
        key = RequestKey(f"offer-{offer}", 0)
        self._confirming[key] = offer
        return SeekPrefix(key=key, hashes=())

    def close(self) -> None:
        self._side.close()
