"""Roles follow what is offered: needs by the latency model; noise changes nothing."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.elastic.controller import ElasticController
from cluster.core.elastic.fleet import STARTS, Busy, Counts, Fleet, fleet_of
from cluster.core.elastic.roles import RoleController
from cluster.core.elastic.rules import RoleRules
from engine.core.step_times import LinearTimes
from kvrelay.types import Role
from router.core.load.flow import OfferedRate
from router.core.load.needs import Needs, WorkerModel, decode_batch
from router.core.load.offered import OfferedWork

TIMES = LinearTimes(
    prefill_overhead_s=0.002,
    prefill_token_s=1e-4,
    decode_knots=((1, 0.010), (100, 0.020)),
    decode_kv_token_s=1e-7,
)
MODEL = WorkerModel(
    times=TIMES, chunk_tokens=2048, most_sequences=100, kv_tokens=200_000, block_tokens=16
)


def rate(
    per_s: float, prompt: int, output: int, *, ttft_s: float | None = 2.0, tpot_s: float | None = 1
) -> OfferedWork:
    """All requests alike."""
    return OfferedWork(
        requests=per_s,
        prompt_tokens=per_s * prompt,
        prompt_squares=per_s * prompt**2,
        prompt_pairs=per_s * prompt * (prompt + 1) / 2,
        output_tokens=per_s * output,
        context_tokens=per_s * output * (prompt + output / 2),
        ttft_s=per_s * (ttft_s or 0.0),
        with_ttft=per_s * (ttft_s is not None),
        tpot_s=per_s * (tpot_s or 0.0),
        with_tpot=per_s * (tpot_s is not None),
    )


def test_rates_are_over_the_window_and_survive_a_router_that_begins_anew() -> None:
    seen = OfferedRate(window_s=10)
    assert seen.per_second == OfferedWork()
    for second in range(30):
        seen.note(
            second, rate(1, 100, 10).scaled(second if second < 20 else 20 + 3 * (second - 20))
        )
    assert seen.per_second.requests == pytest.approx(3, abs=0.4)
    seen.note(31, OfferedWork(requests=1))
    assert seen.per_second == OfferedWork()


LONG, SHORT = rate(26, 2000, 20), rate(26, 50, 800)
"""Mostly prefill, mostly decode: some split of eight serves each."""


# --- needs ----------------------------------------------------------------------------------------


def test_needs_are_the_time_that_work_takes() -> None:
    needs = Needs.of(rate(10, 2048, 200), MODEL)
    assert needs.prefill == pytest.approx(10 * (2048e-4 + 0.002 * 1.5), rel=1e-6)
    assert needs.batch == int(200_000 / (2148 + 16)), "as many as fit into the KV pool"
    step_s = TIMES.decode_s(needs.batch, needs.batch * 2148)
    assert needs.decode == pytest.approx(10 * 200 * step_s / needs.batch, rel=1e-3)


def test_a_batch_keeps_its_pace_unless_nothing_could() -> None:
    tight = rate(1, 100, 100, tpot_s=0.0150)
    batch = decode_batch(tight, MODEL)
    assert 1 < batch < 100
    assert (
        TIMES.decode_s(batch, batch * 150) <= 0.0150 < TIMES.decode_s(batch + 1, (batch + 1) * 150)
    )
    assert decode_batch(rate(1, 100, 100, tpot_s=0.001), MODEL) == 100, "it adds nobody"
    assert decode_batch(rate(1, 100, 100, tpot_s=None), MODEL) == 100


def test_a_tight_time_to_first_token_leaves_workers_idle_and_an_impossible_one_adds_nobody() -> (
    None
):
    loose, tight = (Needs.of(rate(10, 2048, 1, ttft_s=s), MODEL) for s in (20.0, 0.4))
    assert loose.prefill_capacity(4) > tight.prefill_capacity(4) > 0
    assert Needs.of(rate(10, 2048, 1, ttft_s=0.1), MODEL).prefill_capacity(4) == 4.0
    assert Needs.of(rate(10, 2048, 1, ttft_s=None), MODEL).prefill_capacity(4) == 4.0
    one, eight = tight.prefill_capacity(1), tight.prefill_capacity(8)
    assert eight / 8 > one, "many servers share their queue"


def test_a_role_without_workers_serves_nothing_and_gets_one() -> None:
    needs = Needs.of(LONG, MODEL)
    assert needs.served(0, 8) == needs.served(8, 0) == 0.0
    controller, clients = keeper(), Clients()
    assert changes(controller, clients, LONG, 0, 30)[0][1] >= 1


def test_nothing_offered_needs_nobody() -> None:
    needs = Needs.of(OfferedWork(), MODEL)
    assert (needs.prefill, needs.decode) == (0.0, 0.0)
    assert needs.served(1, 1) > 1


# --- changes --------------------------------------------------------------------------------------


class Clients:
    """Offer work at a rate, with noise."""

    def __init__(self, noise: float = 0.0) -> None:
        self.sums, self.now_s, self._noise = OfferedWork(), 0.0, Random(1)
        self._sigma = noise

    def second(self, of: OfferedWork) -> OfferedWork:
        self.now_s += 1
        self.sums = self.sums + of.scaled(max(0.0, self._noise.gauss(1, self._sigma)))
        return self.sums


def keeper(rules: RoleRules | None = None) -> ElasticController:
    """Of roles alone."""
    rules = rules or RoleRules()
    roles = RoleController(rules=rules)
    return ElasticController(model=MODEL, window_s=rules.window_s, roles=roles)


def changes(
    controller: ElasticController, clients: Clients, of: OfferedWork, prefill: int, seconds: int
) -> list[tuple[float, int]]:
    """Of eight workers."""
    found = []
    for _ in range(seconds):
        sums = clients.second(of)
        fleet = Fleet(prefill=prefill, decode=8 - prefill, running=0)
        wanted = controller.look(sums, fleet, clients.now_s).prefill
        if wanted is not None:
            prefill = wanted
            found.append((clients.now_s, wanted))
    return found


def test_roles_follow_the_work_and_then_stay() -> None:
    controller, clients = keeper(), Clients(noise=0.1)
    begun = changes(controller, clients, LONG, 4, 100)
    assert len(begun) == 1 and begun[0][1] > 4
    turned = changes(controller, clients, SHORT, begun[0][1], 300)
    assert 1 <= len(turned) <= 3 and turned[-1][1] < 4
    assert turned[-1][0] - 100 <= 60, "within two windows and a dwell"


def test_noise_changes_nothing() -> None:
    for fitting in (4, 5, 6):
        controller, clients = keeper(), Clients(noise=0.3)
        assert changes(controller, clients, LONG.scaled(0.6), fitting, 3600) == []


def test_few_unlike_requests_are_doubted() -> None:
    """The same work per second, by chance: requests as rare as this say little in one window."""
    rng, changed = Random(3), {}
    for per_s, size in ((40.0, 1), (0.4, 100)):
        controller, clients, prefill = keeper(), Clients(), 4
        for _ in range(1800):
            came = sum(rng.random() < per_s / 100 for _ in range(100))
            fleet = Fleet(prefill=prefill, decode=8 - prefill, running=0)
            one = rate(came, 1100 * size, 60 * size, ttft_s=None)
            wanted = controller.look(clients.second(one), fleet, clients.now_s).prefill
            prefill = wanted or prefill
            changed[size] = changed.get(size, 0) + (wanted is not None)
    assert changed[1] <= 2 and changed[100] <= 10, changed


def test_little_work_changes_nothing() -> None:
    controller = keeper()
    assert changes(controller, Clients(), LONG.scaled(0.01), 1, 300) == []


def test_bounds_hold_and_what_decodes_keeps_its_workers() -> None:
    rules = RoleRules(least_prefill=2, least_decode=3)
    controller, clients = keeper(rules), Clients()
    assert [p for _, p in changes(controller, clients, LONG.scaled(3), 4, 60)] == [5]
    controller, clients = keeper(), Clients()
    for _ in range(60):
        fleet = Fleet(prefill=4, decode=4, running=4 * 100)
        assert controller.look(clients.second(LONG.scaled(3)), fleet, clients.now_s).prefill is None


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 200), st.integers(1, 20_000), st.integers(0, 5000), st.integers(1, 40)
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(2, 20),
    st.integers(0, 4000),
)
def test_any_load_leaves_each_role_a_worker_and_comes_to_rest(
    loads: list[tuple[float, int, int, int]], workers: int, running: int
) -> None:
    controller, clients, prefill = keeper(), Clients(), 1
    for per_s, prompt, output, seconds in loads:
        for _ in range(seconds):
            fleet = Fleet(prefill=prefill, decode=workers - prefill, running=running)
            offered = clients.second(rate(per_s, prompt, output))
            prefill = controller.look(offered, fleet, clients.now_s).prefill or prefill
            assert 1 <= prefill < workers
    last, late = loads[-1], 0
    for second in range(200):
        fleet = Fleet(prefill=prefill, decode=workers - prefill, running=0)
        wanted = controller.look(clients.second(rate(*last[:3])), fleet, clients.now_s).prefill
        late += wanted is not None and second > 60
        prefill = wanted or prefill
    assert late == 0
    assert controller.needs is not None and controller.needs.served(1, 1) < inf


def arriving(rng: Random, per_s: float, burst: int) -> OfferedWork:
    """In a second, in bursts that come by chance."""
    came = sum(rng.random() < per_s / burst / 20 for _ in range(20)) * burst
    requests = (
        rate(1, 1 + int(rng.lognormvariate(7, 0.7)), 1 + int(rng.lognormvariate(5, 0.7)))
        for _ in range(came)
    )
    return sum(requests, OfferedWork())


@pytest.mark.parametrize("burst", [1, 5])
def test_chance_and_bursts_do_not_shorten_the_window(burst: int) -> None:
    rng, seen, sums = Random(2), OfferedRate(window_s=60), OfferedWork()
    for second in range(1200):
        sums = sums + arriving(rng, 10.0, burst)
        seen.note(second, sums)
        assert seen.covers_s >= min(second, 59)


def test_a_clear_change_is_seen_before_the_window_has_passed() -> None:
    rng, seen, sums = Random(2), OfferedRate(window_s=60), OfferedWork()
    for second in range(120):
        sums = sums + arriving(rng, 4.0 if second < 100 else 12.0, 1)
        seen.note(second, sums)
    assert seen.covers_s <= 25
    assert seen.per_second.requests == pytest.approx(12, rel=0.3)


def test_bursts_are_doubted_more_than_requests_that_come_one_by_one() -> None:
    doubts = []
    for burst in (1, 10):
        rng, seen, sums = Random(4), OfferedRate(window_s=60), OfferedWork()
        for second in range(61):
            sums = sums + arriving(rng, 10.0, burst)
            seen.note(second, sums)
        needs = Needs.of(seen.per_second, MODEL, seen.covers_s, seen.bursts)
        doubts.append((needs.prefill_chance, needs.decode_chance))
    assert doubts[1][0] > 1.5 * doubts[0][0] and doubts[1][1] > 1.5 * doubts[0][1]


@pytest.mark.parametrize("prefill", [2, 18])
def test_no_more_workers_change_than_serve_it_all(prefill: int) -> None:
    """Of twenty, with much to spare for those that go on."""
    work = rate(30, 2000, 10) if prefill == 2 else rate(30, 50, 1000)
    controller, clients, wanted = keeper(), Clients(), None
    while wanted is None and clients.now_s < 60:
        fleet = Fleet(prefill=prefill, decode=20 - prefill, running=0)
        wanted = controller.look(clients.second(work), fleet, clients.now_s).prefill
    needs = controller.needs
    assert wanted is not None and needs is not None
    served = {p: needs.served(p, 20 - p) for p in range(1, 20)}
    least = min(abs(p - prefill) for p, share in served.items() if share >= 1.0)
    spared = abs(max(served, key=lambda p: served[p]) - prefill)
    assert least <= abs(wanted - prefill) <= least + 2 < spared


def needs_of(prefill: float, decode: float) -> Needs:
    return Needs(
        prefill=prefill, decode=decode, prompt_s=0.2, variation=0.1, ttft_s=20.0, batch=100
    )


def first_change_s(settle_s: float) -> float:
    """Of sixteen workers, while ever more prompts come."""
    controller = RoleController()
    for second in range(1200):
        fleet = Fleet(prefill=6, decode=10, running=0, settle_s=settle_s)
        if controller.look(needs_of(1 + second / 100, 2.0), fleet, float(second)) is not None:
            return float(second)
    raise AssertionError("no change")


def test_roles_change_for_when_the_change_has_settled() -> None:
    at_once, slowly = first_change_s(0.0), first_change_s(60.0)
    assert 25 <= at_once - slowly <= 75


def test_nothing_else_changes_until_a_change_has_long_settled() -> None:
    for settle_s, rests_s in ((0.5, 15), (4.0, 40)):
        controller, changed = RoleController(), []
        prefill, prompts = 2, 6.0
        for second in range(100):
            fleet = Fleet(prefill=prefill, decode=16 - prefill, running=0, settle_s=settle_s)
            wanted = controller.look(needs_of(prompts, 2.0), fleet, float(second))
            if wanted is not None:
                changed.append(second)
                prefill, prompts = wanted, 12.0
        assert len(changed) == 2 and changed[1] - changed[0] == rests_s


def test_roles_are_not_asked_for_while_something_is_unknown() -> None:
    controller, clients = keeper(), Clients()
    for _ in range(60):
        fleet = Fleet(prefill=1, decode=7, running=0, is_known=False)
        assert controller.look(clients.second(LONG), fleet, clients.now_s).prefill is None
    fleet = Fleet(prefill=1, decode=7, running=0)
    looks = [controller.look(clients.second(LONG), fleet, clients.now_s) for _ in range(30)]
    assert looks[0].prefill is None, "means begin anew"
    assert any(one.prefill is not None for one in looks)


def test_a_fleet_counts_what_decodes_and_not_the_prompts_that_wait() -> None:
    prefill, decode, both = Role.PREFILL, Role.DECODE, Role.BOTH
    there = [
        Busy(name=str(n), role=role, work=work)
        for n, (role, work) in enumerate([(prefill, 900), (decode, 3), (decode, 4), (both, 50)])
    ]
    starting = [Busy(name="new", role=decode, work=STARTS)]
    assert fleet_of(there, starting, settle_s=2.0) == Fleet(
        prefill=1, decode=2, running=7, starting=Counts(0, 1), settle_s=2.0
    )
