"""Time in which this process itself ran: a pause of it is blamed on nobody. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class OwnTime:
    """Counts at most `most_s` between two looks. A process that looks more often counts all of its
    time, and hardly any of the time in which it was stopped or its machine was suspended."""

    most_s: float
    looked_s: float

    def since_last(self, now_s: float) -> float:
        """Seconds since the last look, as far as they count. This is a look."""
        passed_s, self.looked_s = now_s - self.looked_s, now_s
        return max(0.0, min(self.most_s, passed_s))
