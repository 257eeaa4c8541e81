"""What a cluster's workers should be, each second: first their roles, then their number. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from cluster.core.elastic.fleet import NOBODY, Counts, Fleet
from cluster.core.elastic.forecast import DAY_S
from cluster.core.elastic.roles import RoleController
from cluster.core.elastic.rules import ElasticRules
from cluster.core.elastic.totals import Totals
from router.core.load.flow import OfferedRate
from router.core.load.needs import Needs, WorkerModel
from router.core.load.offered import OfferedWork

LEAST_S = 5.0
"""Less time of looking says nothing of how many workers are needed."""
SLOWER = 3.0
"""Numbers follow means over so many windows: chance in less would ask for room that nobody uses. So
does what decodes: answers go on for about as long, and even out what comes by chance."""


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
    _unknown_since_s: float | None = None

    def __post_init__(self) -> None:
        self._begin_anew()

    def keep(self, rules: ElasticRules, fixed: Counts) -> None:
        """`fixed`: workers that no rule is for; there may be others by now."""
        if self.roles is not None:
            self.roles.rules = rules.roles.with_fixed(prefill=fixed.prefill, decode=fixed.decode)
        totals = rules.totals(fixed)
        if self.totals is not None and totals is not None:
            self.totals.rules = totals

    def look(self, offered: OfferedWork, fleet: Fleet, now_s: float) -> Decision:
        self._note_gap(fleet, now_s)
        fast = self._needs(self.rate, offered, now_s)
        slow = self._needs(self.slow_rate, offered, now_s)
        if fast is None or slow is None:
            return NOTHING
        self.needs = fast.with_decode_of(slow)
        roles, totals = self.roles if fleet.is_known else None, self.totals
        return Decision(
            prefill=None if roles is None else roles.look(self.needs, fleet, now_s),
            counts=None if totals is None else _counts(totals, self._of_numbers, fleet, now_s),
        )

    def _note_gap(self, fleet: Fleet, now_s: float) -> None:
        """After a time in which not all was heard, means and what was needed begin anew: else the
        work that was missed would look like none."""
        since_s = self._unknown_since_s
        if fleet.is_known:
            self._unknown_since_s = None
            if since_s is not None and now_s - since_s >= LEAST_S:
                self._begin_anew()
        elif since_s is None:
            self._unknown_since_s = now_s

    def _begin_anew(self) -> None:
        self.rate = OfferedRate(window_s=self.window_s)
        self.slow_rate = OfferedRate(window_s=SLOWER * self.window_s)
        if self.totals is not None:
            self.totals.begin_anew()

    @property
    def _of_numbers(self) -> Needs:
        """As if requests came one by one: a change that is not told yet looks like bursts."""
        rate = self.slow_rate
        return Needs.of(rate.per_second, self.model, rate.covers_s)

    def _needs(self, rate: OfferedRate, offered: OfferedWork, now_s: float) -> Needs | None:
        rate.note(now_s, offered)
        if rate.covers_s < min(LEAST_S, rate.window_s / 2):
            return None
        return Needs.of(rate.per_second, self.model, rate.covers_s, rate.bursts)


def new_controller(
    rules: ElasticRules, model: WorkerModel, period_s: float = DAY_S
) -> ElasticController:
    """`period_s`: after which what is offered may repeat itself."""
    roles = RoleController(rules=rules.roles, period_s=period_s) if rules.flexible else None
    found = ElasticController(model=model, window_s=rules.roles.window_s, roles=roles)
    if (totals := rules.totals(NOBODY)) is not None:
        found.totals = Totals(rules=totals, lead_s=rules.start_s, period_s=period_s)
    return found


def _counts(totals: Totals, needs: Needs, fleet: Fleet, now_s: float) -> Counts | None:
    wanted = totals.look(needs, fleet.all, now_s)
    ordered = _in_order(wanted, fleet, either_role=totals.rules.workers is not None)
    return None if ordered == fleet.all else ordered


def _in_order(wanted: Counts, fleet: Fleet, *, either_role: bool) -> Counts:
    """Additions first. While workers start only these leave, who serve nobody; others once none
    starts and all was heard."""
    have, starting = fleet.all, fleet.starting
    more = Counts(max(wanted.prefill, have.prefill), max(wanted.decode, have.decode))
    if more != have or not fleet.is_known:
        return more
    if not starting.workers:
        return wanted
    fewer = Counts(have.prefill - wanted.prefill, have.decode - wanted.decode)
    if either_role:
        decode = min(fewer.workers, starting.decode)
        fewer = Counts(fewer.workers - decode, decode)
    return Counts(
        have.prefill - min(fewer.prefill, starting.prefill),
        have.decode - min(fewer.decode, starting.decode),
    )
