"""Pairs of workers between which KV travelled lately. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from kvrelay.types import Incarnation
from router.placement import Pair

LATELY_S = 300.0
MOST_PAIRS = 1000


@dataclass(slots=True)
class RecentPairs:
    """As the requests of one router show it."""

    _used_s: dict[Pair, float] = field(default_factory=dict)  # the latest last

    def used(self, pairs: Iterable[Pair], now_s: float) -> None:
        """KV of one request has travelled between them."""
        for pair in pairs:
            self._used_s.pop(pair, None)
            self._used_s[pair] = now_s
        while len(self._used_s) > MOST_PAIRS:
            del self._used_s[next(iter(self._used_s))]

    def lately(self, now_s: float) -> tuple[Pair, ...]:
        """The latest first."""
        used = reversed(self._used_s.items())
        recent = takewhile(lambda one: now_s - one[1] <= LATELY_S, used)
        return tuple(pair for pair, _ in recent)

    def forget(self, worker: Incarnation) -> None:
        """It is gone."""
        self._used_s = {
            pair: used_s
            for pair, used_s in self._used_s.items()
            if worker not in (pair.prefill, pair.decode)
        }
