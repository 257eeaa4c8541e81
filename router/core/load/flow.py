"""What is offered per second, from sums that only grow. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from router.core.load.offered import OfferedWork


@dataclass(slots=True, kw_only=True)
class OfferedRate:
    """Over the last `window_s`. Sums that have shrunk come from routers that began anew."""

    window_s: float
    _seen: deque[tuple[float, OfferedWork]] = field(default_factory=deque)

    def note(self, now_s: float, sums: OfferedWork) -> None:
        if self._seen and sums.requests < self._seen[-1][1].requests:
            self._seen.clear()
        self._seen.append((now_s, sums))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - self.window_s:
            self._seen.popleft()

    @property
    def covers_s(self) -> float:
        return self._seen[-1][0] - self._seen[0][0] if self._seen else 0.0

    @property
    def per_second(self) -> OfferedWork:
        """Nothing, before two looks."""
        if not self.covers_s:
            return OfferedWork()
        return (self._seen[-1][1] - self._seen[0][1]).scaled(1 / self.covers_s)
