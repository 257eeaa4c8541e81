"""Which of a fleet's workers prefill and which decode, as the offered work asks. Pure.

A change is made when it serves clearly more of what is offered, and then not again for a while: so
noise changes nothing. Workers that have just come take at once the role that lacks more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from cluster.core.elastic.fleet import Fleet
from cluster.core.elastic.rules import RoleRules
from router.core.load.needs import Needs


@dataclass(slots=True, kw_only=True)
class RoleController:
    rules: RoleRules = field(default_factory=RoleRules)
    _changed_s: float = -inf
    _workers: int | None = None

    def look(self, needs: Needs, fleet: Fleet, now_s: float) -> int | None:
        """How many shall prefill; None: as many as do."""
        came = fleet.workers - (fleet.workers if self._workers is None else self._workers)
        self._workers = fleet.workers
        if came > 0:
            best = self._best(needs, fleet, came)
            return None if best == fleet.prefill else best
        return self._changed(needs, fleet, now_s)

    def _changed(self, needs: Needs, fleet: Fleet, now_s: float) -> int | None:
        """Not while all is served."""
        rests = now_s - self._changed_s < self.rules.dwell_s
        if rests or needs.served(fleet.prefill, fleet.decode) >= 1.0:
            return None
        best = self._best(needs, fleet, fleet.workers)
        if best == fleet.prefill or self._gain(needs, fleet, best) < self.rules.gain:
            return None
        self._changed_s = now_s
        return best

    def _best(self, needs: Needs, fleet: Fleet, most_changes: int) -> int:
        """Of those that serve the most, the one with the fewest changes; where several serve all,
        the one with most to spare in both roles."""
        holding = list(self._splits(needs, fleet, most_changes))
        if not holding:
            return fleet.prefill
        workers = fleet.workers
        served = {p: min(1.0, needs.served(p, workers - p)) for p in holding}
        most = max(served.values())
        if most >= 1.0:
            return max(holding, key=lambda p: (needs.served(p, workers - p), -p))
        return min((p for p in holding if served[p] == most), key=lambda p: abs(p - fleet.prefill))

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
