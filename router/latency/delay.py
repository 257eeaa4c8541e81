"""How long it usually takes until a message to a worker has an effect. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

_LATEST = 9


@dataclass(slots=True)
class Delay:
    """The median of the latest ones: one that was far too long is not what is usual. 0 before any
    was seen."""

    usual_s: float = 0.0
    _latest: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))

    def observe(self, seconds: float) -> None:
        self._latest.append(max(0.0, seconds))
        self.usual_s = median_low(self._latest)
