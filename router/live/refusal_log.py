"""Logs refusals in bursts: counts by reason, at most one line a second. Lives in the router's event
loop."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

log = logging.getLogger(__name__)


PERIOD_S = 1.0


class BurstLine(NamedTuple):
    """`request_id` is that of the first refused request, as an example."""

    text: str
    request_id: str


@dataclass(slots=True)
class RefusalBursts:
    """Collects refusals until the shell takes the line of the period."""

    _counts: Counter[str] = field(default_factory=Counter)
    _first_id: str = ""

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, reason: str, tier: str, request_id: str) -> None:
        if not self._counts:
            self._first_id = request_id
        self._counts[f"{reason} ({tier})" if tier else reason] += 1

    def take(self) -> BurstLine | None:
        """The refusals since the last call; None: there were none."""
        if not self._counts:
            return None
        counts, self._counts = self._counts, Counter()
        total = counts.total()
        requests = "request" if total == 1 else "requests"
        by_reason = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
        first = "" if total == 1 else "; the first one:"
        return BurstLine(f"refused {total} {requests}: {by_reason}{first}", self._first_id)


class RefusalLog:
    """Logs the first refusal of a burst at once, and those of each following second together."""

    def __init__(self) -> None:
        self._bursts = RefusalBursts()
        self._timer: asyncio.TimerHandle | None = None

    def refused(self, reason: str, tier: str, request_id: str) -> None:
        self._bursts.add(reason, tier, request_id)
        if self._timer is None:
            self._tell()

    def close(self) -> None:
        """Logs the rest."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._bursts:
            self._write()

    def _tell(self) -> None:
        """The timer runs as long as there was something to log."""
        self._timer = None
        if self._bursts:
            self._write()
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._tell)

    def _write(self) -> None:
        line = self._bursts.take()
        assert line is not None, "a line without refusals"
        log.info("%s", line.text, extra={"request_id": line.request_id})
