"""What all routers were offered, from the sums that each reports of itself. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.core.load.offered import OfferedWork

STALE_S = 5.0
"""Reports older than this say nothing of now."""


@dataclass(slots=True)
class OfferedSums:
    """Since each router was first heard. What came while one was not heard is left out: all at
    once it would look like a burst. A router that began anew has smaller sums."""

    total: OfferedWork = field(default_factory=OfferedWork)
    _last: dict[str, tuple[float, OfferedWork]] = field(default_factory=dict)

    def hear(self, router: str, sums: OfferedWork, heard_s: float) -> None:
        """Also again: each report counts once."""
        before_s, before = self._last.get(router, (heard_s, sums))
        self._last[router] = heard_s, sums
        if heard_s - before_s > STALE_S:
            return
        if sums.requests < before.requests:
            before = OfferedWork()
        self.total = self.total + (sums - before)
