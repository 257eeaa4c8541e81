"""How a thread waits for the end of a transfer that it has posted itself.

Within a host the thread that asks is the one that copies: it asks again at once, before another
thread of its process does so on another core. Not by `time.sleep(0)`, which the system rounds
up to its shortest sleep.
"""

from __future__ import annotations

import os
import time

from kvpool.transport.exposure import Check

_ASK_AGAIN = 4
_YIELD_S = 1e-3
_POLL_S = 50e-6
_GRACE_S = 1.0
"""How long a transfer may run before it is asked whether its peer is still there."""


class Waiting:
    """One transfer's. `check` raises when the peer is gone."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._started_s = time.monotonic()
        self._idle = 0

    def again(self, *, idle: bool = True) -> None:
        """Between two questions; `idle`: the last one has moved nothing on. Raises PeerError."""
        waited_s = time.monotonic() - self._started_s
        if waited_s > _GRACE_S:
            self._check()
        if not idle:
            return
        self._idle += 1
        if waited_s > _YIELD_S:
            time.sleep(_POLL_S)
        elif self._idle > _ASK_AGAIN:
            os.sched_yield()
