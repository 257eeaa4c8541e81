"""Refusals as they are logged: counts by reason, at most one line a second. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

PERIOD_S = 1.0


class BurstLine(NamedTuple):
    """`request_id` is that of the first refused request: one to look for elsewhere."""

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
        """What was collected since the last time; None: nothing."""
        if not self._counts:
            return None
        counts, self._counts = self._counts, Counter()
        total = counts.total()
        requests = "request" if total == 1 else "requests"
        by_reason = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
        first = "" if total == 1 else "; the first one:"
        return BurstLine(f"refused {total} {requests}: {by_reason}{first}", self._first_id)
