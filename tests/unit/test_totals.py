"""How many workers: as many as what is foreseen needs, and fewer only when that stayed enough."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import pi, sin
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cluster.core.elastic.controller import ElasticController
from cluster.core.elastic.fleet import NOBODY, Busy, Counts, Fleet, who_leaves
from cluster.core.elastic.forecast import EVERY_S, FIRST, Forecast, Holt, Seasonal
from cluster.core.elastic.roles import RoleController
from cluster.core.elastic.rules import Bounds, TotalRules
from cluster.core.elastic.totals import Totals
from kvrelay.types import Role
from router.core.load.needs import Needs
from router.core.load.offered import OfferedWork
from tests.unit.test_elastic import LONG, MODEL, SHORT, Clients, arriving, rate

LEAD_S, COOLDOWN_S = 60.0, 120.0
BOTH = TotalRules(
    prefill=Bounds(least=1, most=39),
    decode=Bounds(least=1, most=39),
    workers=Bounds(least=2, most=40),
    cooldown_s=COOLDOWN_S,
)
EACH = TotalRules(
    prefill=Bounds(least=2, most=10), decode=Bounds(least=1, most=6), cooldown_s=COOLDOWN_S
)


@dataclass
class Cluster:
    """Workers that start take `LEAD_S`, and then a role as it began."""

    controller: ElasticController
    clients: Clients
    prefill: int = 2
    decode: int = 2
    starting: list[tuple[float, Role]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def second(self, of: OfferedWork) -> None:
        offered, now_s = self.clients.second(of), self.clients.now_s
        roles = [role for _, role in self.starting]
        fleet = Fleet(
            prefill=self.prefill,
            decode=self.decode,
            running=0,
            starting=Counts(roles.count(Role.PREFILL), roles.count(Role.DECODE)),
        )
        decision = self.controller.look(offered, fleet, now_s)
        if decision.prefill is not None:
            self.prefill, self.decode = decision.prefill, fleet.workers - decision.prefill
        elif decision.counts is not None:
            self._resize(fleet, decision.counts, now_s)
        self._join(now_s)
        self.numbers.append(fleet.all.workers)

    def _resize(self, fleet: Fleet, wanted: Counts, now_s: float) -> None:
        have = fleet.all
        for role, more in (
            (Role.PREFILL, wanted.prefill - have.prefill),
            (Role.DECODE, wanted.decode - have.decode),
        ):
            self.starting += [(now_s + LEAD_S, role)] * more
            if more < 0:
                assert not self.starting
                self.prefill += more * (role is Role.PREFILL)
                self.decode += more * (role is Role.DECODE)

    def _join(self, now_s: float) -> None:
        for at_s, role in list(self.starting):
            if at_s <= now_s:
                self.starting.remove((at_s, role))
                self.prefill += role is Role.PREFILL
                self.decode += role is Role.DECODE

    @property
    def served(self) -> float:
        assert self.controller.needs is not None
        return self.controller.needs.served(self.prefill, self.decode)


def cluster(rules: TotalRules = BOTH, noise: float = 0.0) -> Cluster:
    totals = Totals(rules=rules, lead_s=LEAD_S)
    roles = RoleController() if rules.workers is not None else None
    controller = ElasticController(model=MODEL, window_s=20.0, roles=roles, totals=totals)
    return Cluster(controller, Clients(noise))


def run(cluster: Cluster, of: OfferedWork, seconds: int) -> None:
    for _ in range(seconds):
        cluster.second(of)


def test_a_step_is_followed_within_the_start_and_then_nothing_changes() -> None:
    one = cluster(noise=0.1)
    run(one, LONG.scaled(0.3), 300)
    before = one.prefill + one.decode
    run(one, LONG, int(LEAD_S) + 15)
    assert one.served >= 0.97 and one.prefill + one.decode > before
    run(one, LONG, 1800)
    assert one.served >= 1.0
    late = one.numbers[-1800:]
    ups = sum(then > before for before, then in pairwise(late))
    assert ups <= 1, "it does not swing"
    assert abs(late[0] - late[-1]) <= 2, "after a surprise there is some room for the next"


def test_workers_leave_only_after_the_cooldown_and_the_survivors_can_do_it() -> None:
    one = cluster()
    run(one, LONG, 300)
    many = one.numbers[-1]
    run(one, LONG.scaled(0.2), int(COOLDOWN_S) - 5)
    assert one.numbers[-1] == many
    run(one, LONG.scaled(0.2), 60)
    few = one.numbers[-1]
    assert few < many / 2 and one.served >= 1.0
    smaller = Counts(one.prefill, one.decode)
    assert one.controller.needs is not None
    without = (
        one.controller.needs.served(smaller.prefill - 1, smaller.decode),
        one.controller.needs.served(smaller.prefill, smaller.decode - 1),
    )
    assert max(without) < 1.0, "no more than needed are left"


def test_no_traffic_needs_the_fewest_and_nobody_leaves_while_others_start() -> None:
    one = cluster()
    run(one, LONG, 200)
    run(one, OfferedWork(), 300)
    assert one.numbers[-1] == 2


def test_roles_with_numbers_of_their_own_keep_their_bounds() -> None:
    one = cluster(EACH)
    run(one, LONG.scaled(60), 200)
    assert (one.prefill, one.decode) == (10, 6)
    run(one, SHORT, 300)
    assert one.prefill == 2 and 1 < one.decode <= 6
    run(one, OfferedWork(), 300)
    assert (one.prefill, one.decode) == (2, 1)


def test_an_objective_that_no_worker_could_meet_adds_nobody() -> None:
    possible, impossible = cluster(), cluster()
    run(possible, rate(26, 2000, 20, ttft_s=None), 200)
    run(impossible, rate(26, 2000, 20, ttft_s=0.001), 200)
    assert impossible.numbers[-1] == possible.numbers[-1]


def test_new_workers_take_the_role_that_lacks_more() -> None:
    """The totals call all newcomers of both roles decode workers."""
    one = cluster()
    run(one, LONG, int(LEAD_S) + 30)
    assert one.prefill > 2 and one.served >= 1.0


@settings(max_examples=15, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    st.lists(
        st.tuples(
            st.floats(0, 100), st.integers(1, 9000), st.integers(0, 2000), st.integers(1, 100)
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_any_load_keeps_the_bounds_and_comes_to_rest(
    parts: list[tuple[float, int, int, int]],
) -> None:
    one = cluster()
    for per_s, prompt, output, seconds in parts:
        run(one, rate(per_s, prompt, output), seconds)
    assert all(2 <= number <= 40 for number in one.numbers)
    assert one.prefill >= 1 and one.decode >= 1
    run(one, rate(*parts[-1][:3]), 900)
    ups = sum(then > before for before, then in pairwise(one.numbers[-500:]))
    assert ups <= 1, "once there are enough errors, they ask for room"


def test_the_fewer_requests_tell_of_the_work_the_more_are_added() -> None:
    work = rate(6, 5000, 600)
    many, few = (
        Totals(rules=BOTH, lead_s=LEAD_S).look(Needs.of(work, MODEL, over_s), Counts(1, 1), 0.0)
        for over_s in (600.0, 5.0)
    )
    sure = Needs.of(work, MODEL)
    needed = sure.prefill_workers(39) + sure.decode_workers(39)
    assert needed <= many.workers < few.workers < 1.5 * needed


def test_150_requests_ask_for_enough_nine_times_of_ten() -> None:
    """Those of eight seconds, taken to have come in a sixth of that."""
    rng, per_s, over_s, enough = Random(6), 19.0, 8 / 6, 0
    known = sum((arriving(rng, per_s, 1) for _ in range(2000)), OfferedWork())
    sure = Needs.of(known.scaled(6 / 2000), MODEL)
    needed = sure.prefill_workers(39) + sure.decode_workers(39)
    for _ in range(100):
        seen = sum((arriving(rng, per_s, 1) for _ in range(8)), OfferedWork())
        needs = Needs.of(seen.scaled(1 / over_s), MODEL, over_s)
        wanted = Totals(rules=BOTH, lead_s=LEAD_S).look(needs, Counts(1, 1), 0.0)
        enough += wanted.workers >= needed
    assert enough >= 90


def test_who_leaves_has_the_least_to_do() -> None:
    workers = [
        Busy(name=f"{role}-{work}", role=role, work=work)
        for role in (Role.PREFILL, Role.DECODE)
        for work in (5, 1, 3)
    ]
    leaving = who_leaves(workers, Counts(3, 3), Counts(2, 1))
    assert leaving == ["prefill-1", "decode-1", "decode-3"]


# --- what is foreseen -----------------------------------------------------------------------------


def foreseen(values: list[float], lead_s: float, period_s: float) -> Forecast:
    forecast = Forecast(period_s)
    for number, value in enumerate(values):
        forecast.note(number * EVERY_S, value, lead_s)
    return forecast


def test_noise_is_foreseen_by_the_last_value_or_its_mean_and_asks_for_room() -> None:
    rng = Random(1)
    forecast = foreseen([rng.gauss(10, 1) for _ in range(500)], 60.0, 3600.0)
    assert forecast.ahead(60.0) == pytest.approx(10, abs=3)
    assert 0.05 < forecast.room(10.0, 60.0) < 0.3


def test_one_change_asks_for_no_room() -> None:
    """It is an error for as long as a start takes."""
    rng, forecast, lead_s = Random(1), Forecast(24 * 3600.0), 100.0
    for number in range(700):
        forecast.note(number * EVERY_S, rng.gauss(4 if number < 60 else 12, 0.3), lead_s)
        assert forecast.room(12.0, lead_s) < 0.1, number
    assert forecast.room(12.0, lead_s) > 0, "what comes by chance does"


def test_a_trend_is_foreseen() -> None:
    forecast = foreseen([10 + 0.1 * n for n in range(200)], 60.0, 36_000.0)
    assert forecast.used == "holt"
    assert forecast.ahead(60.0) == pytest.approx(10 + 0.1 * 211, rel=0.05)


def test_what_repeats_is_foreseen_by_the_period_before() -> None:
    day = 240
    values = [10 + 8 * sin(2 * pi * n / day) ** 5 for n in range(5 * day // 2)]
    forecast = foreseen(values, 20 * EVERY_S, day * EVERY_S)
    assert forecast.used == "seasonal"
    later = 10 + 8 * sin(2 * pi * (len(values) + 19) / day) ** 5
    assert forecast.ahead(20 * EVERY_S) == pytest.approx(later, rel=0.1)


def test_before_there_is_enough_to_compare_nothing_is_foreseen() -> None:
    forecast = foreseen([float(n) for n in range(FIRST // 2)], 10.0, 3600.0)
    assert forecast.used == "last" and forecast.room(5.0, 10.0) == 0.0
    assert Holt().ahead(3) == 0.0 and Seasonal(10).ahead(3) == 0.0


def test_more_is_never_removed_by_a_forecast() -> None:
    """A trend downwards takes away nothing from what is needed now."""
    totals = Totals(rules=BOTH, lead_s=LEAD_S)
    needs = [Needs.of(LONG.scaled(1 - n / 400), MODEL) for n in range(300)]
    for number, one in enumerate(needs):
        wanted = totals.look(one, Counts(1, 1), number)
        assert wanted.workers >= one.prefill_workers(40) + one.decode_workers(40)


@dataclass
class Wanting(Totals):
    """So many, whatever is offered."""

    counts: Counts = NOBODY

    def look(self, needs: Needs, have: Counts, now_s: float) -> Counts:
        return self.counts


@pytest.mark.parametrize(
    ("rules", "serving", "starting", "is_known", "wanted", "found"),
    [
        (EACH, (1, 3), (0, 0), True, (3, 1), (3, 3)),
        (EACH, (3, 3), (0, 0), True, (3, 1), (3, 1)),
        (EACH, (3, 3), (0, 0), False, (3, 1), None),
        (EACH, (3, 3), (0, 0), False, (4, 1), (4, 3)),
        (EACH, (1, 3), (2, 0), True, (3, 1), None),
        (EACH, (2, 3), (2, 0), True, (3, 1), (3, 3)),
        (EACH, (2, 3), (1, 1), True, (3, 1), (3, 3)),
        (BOTH, (4, 4), (0, 2), True, (3, 6), (4, 5)),
        (BOTH, (4, 4), (1, 2), True, (1, 3), (4, 4)),
        (BOTH, (4, 4), (0, 0), True, (1, 3), (1, 3)),
    ],
)
def test_workers_come_first_then_those_leave_that_start_then_others(
    rules: TotalRules,
    serving: tuple[int, int],
    starting: tuple[int, int],
    is_known: bool,
    wanted: tuple[int, int],
    found: tuple[int, int] | None,
) -> None:
    totals = Wanting(rules=rules, lead_s=LEAD_S, counts=Counts(*wanted))
    controller, clients = ElasticController(model=MODEL, window_s=20.0, totals=totals), Clients()
    prefill, decode = serving
    fleet = Fleet(
        prefill=prefill, decode=decode, running=0, starting=Counts(*starting), is_known=is_known
    )
    for _ in range(10):
        decision = controller.look(clients.second(LONG), fleet, clients.now_s)
    assert decision.counts == (None if found is None else Counts(*found))
