"""How long a decode worker's batch has waited for prompts that are computed there. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

_MOST = 512


@dataclass(slots=True)
class Pauses:
    """As predicted when each was booked."""

    _at_s: list[float] = field(default_factory=list)  # ascending
    _before_s: list[float] = field(default_factory=list)  # the sum of those before it
    _all_s: float = 0.0

    def add(self, pause_s: float, now_s: float) -> None:
        self._at_s.append(now_s)
        self._before_s.append(self._all_s)
        self._all_s += pause_s
        if len(self._at_s) > _MOST:
            del self._at_s[0], self._before_s[0]

    def since(self, at_s: float) -> float:
        """Their sum."""
        first = bisect_left(self._at_s, at_s)
        return self._all_s - self._before_s[first] if first < len(self._at_s) else 0.0
