"""When the next place will be free: the running mean gap between ended requests. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_RETRY_S = 1.0
SHORTEST_RETRY_S = 0.05
LONGEST_RETRY_S = 30.0
_WEIGHT = 0.2


@dataclass(slots=True)
class ReleaseClock:
    _last_s: float | None = None
    _gap_s: float | None = None

    def released(self, now_s: float) -> None:
        if self._last_s is not None:
            gap_s = now_s - self._last_s
            old_s = gap_s if self._gap_s is None else self._gap_s
            self._gap_s = (1 - _WEIGHT) * old_s + _WEIGHT * gap_s
        self._last_s = now_s

    def retry_after_s(self) -> float:
        gap_s = FIRST_RETRY_S if self._gap_s is None else self._gap_s
        return min(max(gap_s, SHORTEST_RETRY_S), LONGEST_RETRY_S)
