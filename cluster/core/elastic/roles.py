"""Which of a fleet's workers prefill and which decode, as the offered work asks. Pure.

The number of workers stays; only roles change. A change is made when it serves clearly more of
what is offered, and then not again for a while: so noise changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from cluster.core.elastic.rules import RoleRules
from kvrelay.types import Role
from router.core.load.flow import OfferedRate
from router.core.load.needs import Needs, WorkerModel
from router.core.load.offered import OfferedWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """`running`: sequences that decode now."""

    prefill: int
    decode: int
    running: int

    @property
    def workers(self) -> int:
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """A worker that may change: sequences that it decodes, or prompt tokens that wait there."""

    name: str
    role: Role
    work: int


def who_changes(workers: Iterable[Busy], more_prefill: int) -> tuple[list[str], Role]:
    """Those with the least to do, and their new role."""
    old, new = (Role.DECODE, Role.PREFILL) if more_prefill > 0 else (Role.PREFILL, Role.DECODE)
    idlest = sorted((one for one in workers if one.role is old), key=lambda one: one.work)
    return [one.name for one in idlest[: abs(more_prefill)]], new


class RolePolicy(Protocol):
    def look(self, offered: OfferedWork, fleet: Fleet, now_s: float) -> int | None:
        """How many shall prefill; None: as many as do. `offered`: all sums since the start."""


@dataclass(slots=True, kw_only=True)
class RoleController:
    """Implements RolePolicy. `needs`: as last seen; None before there was enough to see."""

    model: WorkerModel
    rules: RoleRules = field(default_factory=RoleRules)
    needs: Needs | None = None
    rate: OfferedRate = field(init=False)
    _changed_s: float = -inf

    def __post_init__(self) -> None:
        self.rate = OfferedRate(window_s=self.rules.window_s)

    def look(self, offered: OfferedWork, fleet: Fleet, now_s: float) -> int | None:
        self.rate.note(now_s, offered)
        if self.rate.covers_s < self.rules.window_s / 2:
            return None
        self.needs = Needs.of(self.rate.per_second, self.model, self.rate.covers_s)
        best = self._best(self.needs, fleet)
        if best == fleet.prefill or now_s - self._changed_s < self.rules.dwell_s:
            return None
        if self._gain(self.needs, fleet, best) < self.rules.gain:
            return None
        self._changed_s = now_s
        return best

    def _best(self, needs: Needs, fleet: Fleet) -> int:
        """Of those that serve the most, the one with the fewest changes; where several serve all,
        the one with most to spare in both roles."""
        rules, workers = self.rules, fleet.workers
        splits = range(rules.least_prefill, workers - rules.least_decode + 1)
        holding = [p for p in splits if p <= fleet.prefill or _holds(needs, fleet, workers - p)]
        if not holding:
            return fleet.prefill
        served = {p: min(1.0, needs.served(p, workers - p)) for p in holding}
        most = max(served.values())
        if most >= 1.0:
            return max(holding, key=lambda p: (needs.served(p, workers - p), -p))
        return min((p for p in holding if served[p] == most), key=lambda p: abs(p - fleet.prefill))

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
