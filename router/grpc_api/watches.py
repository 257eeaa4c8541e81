"""The open Admin.Watch streams of a router. Lives in its event loop.

Each stream builds a report only when its client has taken the one before, so a slow client skips
reports and holds one at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from kvrelay.errors import InvalidRequest, Refused
from kvrelay.v1.admin_pb2 import WatchReport

MOST_STREAMS = 64
LEAST_INTERVAL_S, MOST_INTERVAL_S = 0.1, 3600.0


@dataclass(slots=True)
class Watches:
    open: int = 0
    _ending: asyncio.Event = field(default_factory=asyncio.Event)

    def check(self, interval_s: float) -> None:
        """Raises InvalidRequest for an interval that can't be, Refused when too many are open."""
        if not LEAST_INTERVAL_S <= interval_s <= MOST_INTERVAL_S:
            raise InvalidRequest(
                f"interval_s is {interval_s:g}: give {LEAST_INTERVAL_S:g} to {MOST_INTERVAL_S:g} s",
                param="interval_s",
            )
        if self.open >= MOST_STREAMS:
            told = f"{MOST_STREAMS} watches are open, and no more are accepted"
            raise Refused("watches", told, retry_after_s=None)

    async def reports(
        self, report: Callable[[], WatchReport], interval_s: float
    ) -> AsyncGenerator[WatchReport]:
        """The first one at once, until `end`."""
        self.open += 1
        try:
            while not self._ending.is_set():
                yield report()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), interval_s)
        finally:
            self.open -= 1

    def end(self) -> None:
        """Open streams would keep a stopping server from closing its port."""
        self._ending.set()
