"""How long what is decided takes to have an effect: the start of a worker, so far ahead it has to
be wanted, and a change of a role, until every router tells it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import ceil

from kvrelay.messages import WorkerHello
from kvrelay.starts import whole_s
from kvrelay.types import Incarnation, Role

MOST_STARTS = 100
MOST_CHANGES = 100
GIVEN_UP_S = 60.0
"""A change of a role that has not settled by then was refused, or its worker has gone."""


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
        return _nine_of_ten(self._seconds.values())


@dataclass(slots=True)
class Settling:
    """Of changes of roles."""

    _asked: dict[str, tuple[Role, float]] = field(default_factory=dict)  # worker |->; when
    _took_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_CHANGES))

    def asked(self, worker: str, role: Role, now_s: float) -> None:
        self._asked[worker] = role, now_s

    def hear(self, roles: Mapping[str, Collection[Role]], now_s: float) -> None:
        """`roles`: # worker |-> those that routers tell of it, one for each router"""
        for worker, (role, since_s) in list(self._asked.items()):
            told = roles.get(worker, ())
            if told and all(one is role for one in told):
                self._took_s.append(now_s - since_s)
                del self._asked[worker]
            elif now_s - since_s > GIVEN_UP_S:
                del self._asked[worker]

    @property
    def p90_s(self) -> float:
        """Nine of ten took at most so long; 0 before any was seen."""
        return _nine_of_ten(self._took_s) if self._took_s else 0.0


def _nine_of_ten(seconds: Collection[float]) -> float:
    return sorted(seconds)[ceil(0.9 * len(seconds)) - 1]
