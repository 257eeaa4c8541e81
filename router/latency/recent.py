"""The latest latencies of one kind, and their quantiles. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

_MOST = 20_000
"""Of more only the latest are kept."""


@dataclass(slots=True, kw_only=True)
class Recent:
    """Those of the last `window_s`."""

    window_s: float
    _latest: deque[tuple[float, float]] = field(default_factory=deque)  # (when, seconds)
    _ascending: list[float] = field(default_factory=list)

    def observe(self, seconds: float, now_s: float) -> None:
        self._latest.append((now_s, seconds))
        insort(self._ascending, seconds)
        if len(self._latest) > _MOST:
            self._drop_oldest()

    def quantile(self, share: float, now_s: float) -> float | None:
        """None where too few are known for one of them to lie beyond it: 100 for 0.99."""
        found = self.of_few(share, now_s)
        return None if len(self._ascending) < round(1 / (1 - share)) else found

    def of_few(self, share: float, now_s: float) -> float | None:
        """Of those that are known, however few: of less than 100 the worst for 0.99."""
        while self._latest and self._latest[0][0] < now_s - self.window_s:
            self._drop_oldest()
        if not self._ascending:
            return None
        return self._ascending[min(len(self._ascending) - 1, int(share * len(self._ascending)))]

    def clear(self) -> None:
        self._latest.clear()
        self._ascending.clear()

    def _drop_oldest(self) -> None:
        _, seconds = self._latest.popleft()
        del self._ascending[bisect_left(self._ascending, seconds)]
