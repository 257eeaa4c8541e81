"""How far ahead a worker has to be wanted: the time that most of the latest starts took. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from kvrelay.messages import WorkerHello
from kvrelay.starts import whole_s
from kvrelay.types import Incarnation

MOST_STARTS = 100


@dataclass(slots=True, kw_only=True)
class LatestStarts:
    """Of workers that are alike, such as those of one pool. `guess_s`: while none is known."""

    guess_s: float
    _seconds: dict[Incarnation, float] = field(default_factory=dict)  # the latest last

    def hear(self, hello: WorkerHello) -> None:
        """Of any router, and again: each start counts once."""
        if not hello.start:
            return
        self._seconds[hello.incarnation] = whole_s(hello.start)
        if len(self._seconds) > MOST_STARTS:
            del self._seconds[next(iter(self._seconds))]

    @property
    def p90_s(self) -> float:
        """Nine of ten starts took at most so long."""
        if not self._seconds:
            return self.guess_s
        return sorted(self._seconds.values())[ceil(0.9 * len(self._seconds)) - 1]
