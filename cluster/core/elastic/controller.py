"""What a cluster's workers should be, each second: first their roles, then their number. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from cluster.core.elastic.fleet import Counts, Fleet
from cluster.core.elastic.roles import RoleController
from cluster.core.elastic.totals import Totals
from router.core.load.flow import OfferedRate
from router.core.load.needs import Needs, WorkerModel
from router.core.load.offered import OfferedWork

LEAST_S = 5.0
"""Less time of looking says nothing of how many workers are needed."""
TOTALS_WINDOW_S = 60.0
"""Numbers follow means over so long: chance in less would ask for room that nobody uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`prefill`: so many of those that are there shall prefill. `counts`: so many workers shall
    there be. None: as it is."""

    prefill: int | None = None
    counts: Counts | None = None


NOTHING = Decision()


class ElasticPolicy(Protocol):
    def look(self, offered: OfferedWork, fleet: Fleet, now_s: float) -> Decision:
        """`offered`: all sums since the start."""


@dataclass(slots=True, kw_only=True)
class ElasticController:
    """Implements ElasticPolicy. `needs`: as last seen; None before there was enough to see."""

    model: WorkerModel
    window_s: float
    roles: RoleController | None = None
    totals: Totals | None = None
    needs: Needs | None = None
    rate: OfferedRate = field(init=False)
    slow_rate: OfferedRate = field(init=False)

    def __post_init__(self) -> None:
        self.rate = OfferedRate(window_s=self.window_s)
        self.slow_rate = OfferedRate(window_s=TOTALS_WINDOW_S)

    def look(self, offered: OfferedWork, fleet: Fleet, now_s: float) -> Decision:
        self.needs = self._needs(self.rate, offered, now_s)
        slow = self._needs(self.slow_rate, offered, now_s)
        if self.needs is None or slow is None:
            return NOTHING
        roles, totals = self.roles, self.totals
        return Decision(
            prefill=None if roles is None else roles.look(self.needs, fleet, now_s),
            counts=None if totals is None else _counts(totals, slow, fleet, now_s),
        )

    def _needs(self, rate: OfferedRate, offered: OfferedWork, now_s: float) -> Needs | None:
        rate.note(now_s, offered)
        if rate.covers_s < LEAST_S:
            return None
        return Needs.of(rate.per_second, self.model, rate.covers_s)


def _counts(totals: Totals, needs: Needs, fleet: Fleet, now_s: float) -> Counts | None:
    """Nobody leaves while others start."""
    have = fleet.all
    wanted = totals.look(needs, have, now_s)
    if wanted == have or (fleet.starting.workers and wanted.workers < have.workers):
        return None
    return wanted
