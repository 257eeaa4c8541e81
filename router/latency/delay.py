"""How long it usually takes until a message to a worker has an effect. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_NEW_SHARE = 0.1


@dataclass(slots=True)
class Delay:
    """The mean of the first ones, then of the latest; 0 before any was seen."""

    mean_s: float = 0.0
    _seen: int = 0

    def observe(self, seconds: float) -> None:
        self._seen += 1
        self.mean_s += max(_NEW_SHARE, 1 / self._seen) * (max(0.0, seconds) - self.mean_s)
