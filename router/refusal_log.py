"""Logs refusals in bursts. Lives in the router's event loop."""

from __future__ import annotations

import asyncio
import logging

from router.refusal_bursts import PERIOD_S, RefusalBursts

log = logging.getLogger(__name__)


class RefusalLog:
    """The first refusal of a burst is logged at once, those of each following second together."""

    def __init__(self) -> None:
        self._bursts = RefusalBursts()
        self._timer: asyncio.TimerHandle | None = None

    def refused(self, reason: str, tier: str, request_id: str) -> None:
        self._bursts.add(reason, tier, request_id)
        if self._timer is None:
            self._tell()

    def close(self) -> None:
        """Logs what is left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._bursts:
            self._write()

    def _tell(self) -> None:
        """The timer goes on while there was something to say."""
        self._timer = None
        if self._bursts:
            self._write()
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._tell)

    def _write(self) -> None:
        line = self._bursts.take()
        assert line is not None, "a line without refusals"
        log.info("%s", line.text, extra={"request_id": line.request_id})
