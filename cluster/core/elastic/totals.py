"""How many workers a cluster should have, as the offered work asks. Pure.

Workers are added for what is foreseen when they will have started, and some more, as far as the
forecasts have been wrong. They are removed when fewer were enough all the time for a while.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from cluster.core.elastic.fleet import Counts
from cluster.core.elastic.forecast import DAY_S, Forecast, room_for
from cluster.core.elastic.rules import TotalRules
from router.core.load.needs import Needs


@dataclass(slots=True, kw_only=True)
class Totals:
    """`lead_s`: how long a worker takes to start. `period_s`: in which work repeats itself."""

    rules: TotalRules
    lead_s: float
    period_s: float = DAY_S
    prefill: Forecast = field(init=False)
    decode: Forecast = field(init=False)
    _seen: deque[tuple[float, Counts]] = field(default_factory=deque)
    _began_s: float | None = None

    def __post_init__(self) -> None:
        self.prefill, self.decode = Forecast(self.period_s), Forecast(self.period_s)

    def look(self, needs: Needs, have: Counts, now_s: float) -> Counts:
        """How many there shall be. `have`: all that there are, those that start included."""
        self.prefill.note(now_s, needs.prefill, self.lead_s)
        self.decode.note(now_s, needs.decode, self.lead_s)
        needed = self._needed(needs)
        self._remember(needed, now_s)
        if self.rules.workers is not None:
            most = self._most([one.workers for _, one in self._seen], now_s)
            total = _follow(needed.workers, most, have.workers)
            return self._of_both(needs, have, self.rules.workers.clamp(total))
        prefill = self._most([one.prefill for _, one in self._seen], now_s)
        decode = self._most([one.decode for _, one in self._seen], now_s)
        return Counts(
            self.rules.prefill.clamp(_follow(needed.prefill, prefill, have.prefill)),
            self.rules.decode.clamp(_follow(needed.decode, decode, have.decode)),
        )

    def begin_anew(self) -> None:
        """What was needed lately is not known."""
        self._seen.clear()
        self._began_s = None

    def _of_both(self, needs: Needs, have: Counts, total: int) -> Counts:
        """One after the other leaves the role that it is missed less in; who comes takes any."""
        prefill, decode = have
        if total > have.workers:
            return Counts(prefill, total - prefill)
        while prefill + decode > total:
            fewer_prefill = needs.served(prefill - 1, decode) > needs.served(prefill, decode - 1)
            if prefill > self.rules.prefill.least and (
                fewer_prefill or decode <= self.rules.decode.least
            ):
                prefill -= 1
            else:
                decode -= 1
        return Counts(prefill, decode)

    def _needed(self, needs: Needs) -> Counts:
        """Now, and when one that starts now has started."""
        later = needs.scaled(
            _growth(self.prefill, needs.prefill, needs.prefill_chance, self.lead_s),
            _growth(self.decode, needs.decode, needs.decode_chance, self.lead_s),
        )
        prefill, decode = self.rules.prefill, self.rules.decode
        return Counts(
            prefill.clamp(later.prefill_workers(prefill.most)),
            decode.clamp(later.decode_workers(decode.most)),
        )

    def _remember(self, needed: Counts, now_s: float) -> None:
        self._began_s = now_s if self._began_s is None else self._began_s
        self._seen.append((now_s, needed))
        while self._seen[0][0] < now_s - self.rules.cooldown_s:
            self._seen.popleft()

    def _most(self, counts: list[int], now_s: float) -> int | None:
        """None: it has not been looked at for long enough."""
        assert self._began_s is not None
        return max(counts) if now_s - self._began_s >= self.rules.cooldown_s else None


def _follow(needed: int, most: int | None, have: int) -> int:
    """`most`: of all that were needed lately."""
    if needed > have:
        return needed
    return have if most is None else min(have, most)


def _growth(forecast: Forecast, now: float, chance: float, lead_s: float) -> float:
    """What may be needed later over what is now; never less. `chance`: the standard deviation of
    `now`, as a share of it. Nine of ten times no more is needed."""
    if now <= 0:
        return 1.0
    room = max(forecast.room(now, lead_s), room_for(chance))
    return max(1.0, forecast.ahead(lead_s) / now) + room
