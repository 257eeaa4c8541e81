"""Which of a fleet's workers prefill and which decode, as the offered work asks. Pure.

A change is made when it serves clearly more of what will be offered when it has settled, and then
not again for a while: so noise changes nothing. As few workers change as serve it all nine of ten
times. Workers that have just come take at once the role that lacks more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from cluster.core.elastic.fleet import Fleet
from cluster.core.elastic.forecast import DAY_S, Forecast, room_for
from cluster.core.elastic.rules import RoleRules
from router.core.load.needs import Needs

ALIKE = 0.01
"""Splits that serve so much less, as a share of what is offered, are as good."""
SETTLED = 10.0
"""Times that a change takes to settle: so long nothing else changes."""


@dataclass(slots=True, kw_only=True)
class RoleController:
    """`period_s`: in which work repeats itself."""

    rules: RoleRules = field(default_factory=RoleRules)
    period_s: float = DAY_S
    prefill: Forecast = field(init=False)
    decode: Forecast = field(init=False)
    _changed_s: float = -inf
    _workers: int | None = None

    def __post_init__(self) -> None:
        self.prefill, self.decode = Forecast(self.period_s), Forecast(self.period_s)

    def look(self, needs: Needs, fleet: Fleet, now_s: float) -> int | None:
        """How many shall prefill; None: as many as do."""
        needs = self._then(needs, fleet.settle_s, now_s)
        came = fleet.workers - (fleet.workers if self._workers is None else self._workers)
        self._workers = fleet.workers
        if came > 0:
            best = self._best(needs, fleet, came)
            return None if best == fleet.prefill else best
        return self._changed(needs, fleet, now_s)

    def _then(self, needs: Needs, settle_s: float, now_s: float) -> Needs:
        """When a change that begins now has settled."""
        self.prefill.note(now_s, needs.prefill, settle_s)
        self.decode.note(now_s, needs.decode, settle_s)
        return needs.scaled(self.prefill.change(settle_s), self.decode.change(settle_s))

    def _changed(self, needs: Needs, fleet: Fleet, now_s: float) -> int | None:
        """Not while all is served."""
        rests = now_s - self._changed_s < max(self.rules.dwell_s, SETTLED * fleet.settle_s)
        if rests or needs.served(fleet.prefill, fleet.decode) >= 1.0:
            return None
        best = self._best(needs, fleet, fleet.workers)
        if best == fleet.prefill or self._gain(needs, fleet, best) < self.rules.gain:
            return None
        self._changed_s = now_s
        return best

    def _best(self, needs: Needs, fleet: Fleet, most_changes: int) -> int:
        """Of those that serve the most nine of ten times, one with the fewest changes."""
        needs = needs.scaled(1 + room_for(needs.prefill_chance), 1 + room_for(needs.decode_chance))
        splits = self._splits(needs, fleet, most_changes)
        served = {p: min(1.0, needs.served(p, fleet.workers - p)) for p in splits}
        most = max(served.values(), default=0.0)
        good = [prefill for prefill, share in served.items() if share >= most - ALIKE]
        return min(good, key=lambda p: (abs(p - fleet.prefill), -served[p]), default=fleet.prefill)

    def _splits(self, needs: Needs, fleet: Fleet, most_changes: int) -> Iterable[int]:
        """That hold what decodes now."""
        rules, workers = self.rules, fleet.workers
        least = max(rules.least_prefill, fleet.prefill - most_changes)
        most = min(workers - rules.least_decode, fleet.prefill + most_changes)
        for prefill in range(least, most + 1):
            if prefill <= fleet.prefill or _holds(needs, fleet, workers - prefill):
                yield prefill

    def _gain(self, needs: Needs, fleet: Fleet, prefill: int) -> float:
        """How much more would be served, as a share of what is now, if chance spoke for the
        change."""
        needs = needs.doubted(more_prefill=prefill > fleet.prefill)
        now = min(1.0, needs.served(fleet.prefill, fleet.decode))
        then = min(1.0, needs.served(prefill, fleet.workers - prefill))
        return then / now - 1 if now else inf


def _holds(needs: Needs, fleet: Fleet, decode: int) -> bool:
    """Whether so many decode workers can go on with all that decodes now."""
    return decode * needs.batch >= fleet.running
