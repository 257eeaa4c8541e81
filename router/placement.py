"""Which workers serve a request, and what speaks against two of them together. Pure values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.types import Incarnation
from kvrelay.values import value


@dataclass(frozen=True, slots=True)
class Pair:
    """Two workers between which KV is handed over."""

    prefill: Incarnation
    decode: Incarnation


@value
class Placement:
    """`prefill` None: the decode worker prefills too."""

    decode: Incarnation
    prefill: Incarnation | None

    @property
    def pair(self) -> Pair | None:
        return None if self.prefill is None else Pair(self.prefill, self.decode)


Against = tuple[int, float]
Objections = Callable[[Pair | None], Against]
"""How much speaks against a pair (0: nothing), and what decides among equals: the least is best."""


NOTHING_AGAINST: Against = (0, 0.0)


def trusted(_: Pair | None) -> Against:
    return NOTHING_AGAINST
