"""What a worker's loop does for its pool: asks, offers, and passes on what comes back.

Runs on the loop's thread.
"""

from __future__ import annotations

import time
from collections import deque

from cluster.pool_side import PoolSide
from kvpool.openings import Openings
from kvpool.pool_client_events import (
    ClientEvent,
    ClientTick,
    OfferSettled,
    PrefixFetched,
    PrefixFound,
    PrefixPinned,
)
from kvpool.restores import Restored
from kvpool.write_behind import WriteBehind


class PoolTurns:
    def __init__(self, side: PoolSide, openings: Openings, write_behind: WriteBehind) -> None:
        self._side = side
        self._openings = openings
        self._write_behind = write_behind

    def turn(self) -> list[Restored]:
        """After the worker's own events: their questions, and what they have named."""
        restored = [
            one for question in self._openings.take_outbox() for one in self.handle(question)
        ]
        offer = self._write_behind.offer(time.monotonic())
        return restored if offer is None else [*restored, *self.handle(offer)]

    def tick(self) -> list[Restored]:
        return self.handle(ClientTick())

    def handle(self, event: ClientEvent) -> list[Restored]:
        restored: list[Restored] = []
        events = deque([event])
        while events:
            for answer in self._side.handle(events.popleft()):
                match answer:
                    case OfferSettled(offer=offer):
                        self._write_behind.settled(offer)
                    case PrefixFound() | PrefixFetched():
                        ended = self._openings.answer(answer, time.monotonic())
                        restored += [] if ended is None else [ended]
                    case PrefixPinned():
                        pass
            events.extend(self._openings.take_outbox())
        return restored

    def close(self) -> None:
        self._side.close()
