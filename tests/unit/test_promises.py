from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random

import pytest

from kvrelay.counters import Counters
from kvrelay.messages import Released, Reserved
from kvrelay.qos import ONE_TIER, QosTier, QosTiers
from kvrelay.types import Incarnation, Objectives, Role
from router.core.core import RouterCore
from router.core.events import (
    Aborted,
    Command,
    Refuse,
    Send,
    Submitted,
    WorkerJoined,
    WorkerSaid,
)
from router.core.load.margins import Margin
from router.core.promises.claims import EXCESS, Claims, Share
from router.core.promises.promises import GRACE_S, Promises
from router.core.promises.work import NOTHING_PROMISED, Promised, ToldPromise
from router.core.router_state import RouterState
from tests.unit.router_kit import PerToken, hello, key, request, says


def work(seconds: float) -> Promised:
    return Promised(prefill_s=seconds, sequences=1, kv_tokens=10)


def promised(claimed: float) -> Promises:
    """Nothing yet, of which such a share will be claimed."""
    return Promises(claims=Claims(first=Share(claimed)), delay_s=0)


def counted(works: float, claimed: float) -> float:
    """Of so much work that was promised, what the line counts."""
    return EXCESS * claimed * works


def test_a_promise_is_claimed_once_and_not_before_its_time() -> None:
    promises = promised(0.5)
    promises.make(7, work(1), soonest_s=5, now_s=0)
    assert promises.claim(7, 4) is None
    assert promises.claim(8, 5) is None
    promise = promises.claim(7, 4.96)
    assert promise is not None
    assert promise.due_s == 5
    assert promises.claim(7, 5) is None
    assert len(promises) == 0


def test_what_is_ahead_is_what_was_promised_earlier() -> None:
    promises = promised(1.0)
    for digest, after_s in ((1, 3.0), (2, 1.0), (3, 2.0)):
        promises.make(digest, work(digest), soonest_s=after_s, now_s=0)
    assert promises.line() == Promised(prefill_s=6, sequences=3, kv_tokens=30).times(EXCESS)
    assert promises.before(2.5).prefill_s == 5
    assert promises.claim(3, 2) is not None
    assert promises.before(2.5).prefill_s == 2
    assert promises.line().prefill_s == pytest.approx(counted(3, 1))


def test_what_was_promised_to_lower_tiers_is_not_ahead() -> None:
    promises = promised(1.0)
    for priority in range(3):
        promises.make(priority, work(10**priority), soonest_s=1, now_s=0, priority=priority)
    for ahead, each in ((promises.line, EXCESS), (partial(promises.before, 2.0), 1)):
        found = [ahead(priority).prefill_s for priority in range(3)]
        assert found == pytest.approx([each, 11 * each, 111 * each])
    assert promises.claim(0, 1) is not None
    assert promises.line(2).prefill_s == pytest.approx(counted(110, 1))
    assert promises.line() == NOTHING_PROMISED


def test_it_counts_for_the_share_that_comes_back() -> None:
    promises = promised(0.5)
    for digest in range(200):
        promises.make(digest, work(1), soonest_s=1, now_s=0)
    assert promises.before(2).prefill_s == pytest.approx(100)
    assert promises.claim(999, 1 + GRACE_S + 0.1) is None
    assert promises.claims.first.value < 0.001
    assert promises.before(2) == promises.line() == NOTHING_PROMISED
    for digest in range(200):
        promises.make(digest, work(1), soonest_s=1, now_s=10)
        assert promises.claim(digest, 11) is not None
    assert promises.claims.first.value > 0.999


def test_what_nobody_came_back_for_keeps_no_one_out() -> None:
    """Also where nobody asks for anything new."""
    promises = promised(claimed=1.0)
    due_s = promises.make(7, work(2.0), 1.0, now_s=0.0).due_in_s
    assert promises.soon(due_s, 0, all_by_own=1.0).prefill_s >= 2.0
    assert promises.soon(due_s + GRACE_S + 0.1, 0, all_by_own=1.0).prefill_s == 0


def test_the_line_stays_as_it_was_told() -> None:
    """Half came back when 100 were told their times. Now all do: these are expected to come soon,
    and who is told a time now goes behind what the others were told."""
    promises = promised(0.5)
    for digest in range(100):
        promises.make(digest, work(1), soonest_s=digest / 2, now_s=0)
    promises.claims.first.value = 1.0
    assert promises.before(2.5).prefill_s == 5
    assert promises.line().prefill_s == pytest.approx(counted(100, 0.5))
    promises.make(100, work(1), soonest_s=50, now_s=0)
    assert promises.line().prefill_s == pytest.approx(counted(100, 0.5) + counted(1, 1))
    assert promises.claim(3, 2) is not None
    left = counted(97, 0.5) + counted(1, 1)
    assert promises.line().prefill_s == pytest.approx(left), "the first two did not come"
    assert promises.claim(100, 50.9) is not None
    assert promises.line() == NOTHING_PROMISED, "nobody came for the others"


def test_others_promises_are_in_the_line_as_many_as_they_were_when_it_was_told() -> None:
    promises = promised(0.5)
    for all_by_own in (3, 1):
        promises.make(all_by_own, work(1), soonest_s=1, now_s=0, all_by_own=all_by_own)
    assert promises.line().prefill_s == pytest.approx(counted(4, 0.5))
    assert promises.before(2).prefill_s == 1, "its own"


def test_who_had_come_back_already_counts_apart() -> None:
    promises = promised(1.0)
    for digest in range(50):
        promises.make(digest, work(1), soonest_s=1, now_s=0, again=True)
    assert promises.claim(99, 10) is None
    again = promises.claims.again.value
    assert again < 0.1, "none of them has come"
    promises.make(99, work(2), soonest_s=1, now_s=10)
    promises.make(98, work(1), soonest_s=1, now_s=10, again=True)
    assert promises.before(12).prefill_s == pytest.approx(again + 2)
    assert promises.line().prefill_s == pytest.approx(counted(1, again) + counted(2, 1))


def test_equal_requests_have_a_promise_each() -> None:
    promises = promised(1.0)
    for after_s in (3, 1.5, 2):
        promises.make(7, work(after_s), soonest_s=after_s, now_s=0)
    assert len(promises) == 3
    assert promises.claim(7, 0.9) is None
    found = [promises.claim(7, 2.5), promises.claim(7, 2.5)]
    assert [one and one.due_s for one in found] == [1.5, 2], "the oldest first"
    assert promises.claim(7, 2.5) is None, "the third is not due yet"
    assert promises.claim(7, 3) is not None
    promises.validate()


# --- brought back by its client -------------------------------------------------------------------


def told(promises: Promises, due_s: float, digest: int = 7) -> ToldPromise:
    return promises.make(digest, work(1), soonest_s=due_s, now_s=0)


def brought(promise: ToldPromise, at_s: float) -> ToldPromise:
    """What it says then; it was made at 0."""
    return replace(promise, due_in_s=promise.due_in_s - at_s)


def test_who_brings_its_promise_gets_that_one() -> None:
    promises = promised(1.0)
    one, other = told(promises, 1), told(promises, 2)
    assert promises.claim(7, 1.5, brought(other, 1.5)) is None, "it is too early"
    assert promises.early(brought(other, 1.5), 1.5) is not None
    found = promises.claim(7, 2, brought(other, 2))
    assert found is not None and found.promise_id == other.promise_id
    assert promises.claim(7, 2, brought(other, 2)) is None, "once"
    assert promises.claim(8, 2, brought(one, 2)) is not None
    assert (promises.claimed, len(promises)) == (2, 0)
    promises.validate()


def test_any_router_honours_it_within_what_clocks_differ_by() -> None:
    made = told(promised(1.0), 5)
    for at_s, honoured in ((4.4, False), (4.5, True), (6.2, True), (6.7, True), (6.8, False)):
        elsewhere = Promises(ids=iter(range(1000, 2000)))
        found = elsewhere.claim(7, 100, brought(made, at_s))
        assert (found is not None) is honoured, at_s
        assert elsewhere.claim(7, 100, brought(made, at_s)) is None, "once"
        elsewhere.validate()


def test_what_was_claimed_here_and_made_elsewhere_stands_for_an_own_one() -> None:
    here, there = promised(1.0), Promises(ids=iter(range(1000, 2000)))
    own = [told(here, due_s) for due_s in (1, 2, 9)]
    others = [told(there, due_s) for due_s in (1, 2, 2)]
    for other in others:
        assert here.claim(7, 2, brought(other, 2)) is not None
        here.validate()
    assert (len(here), here.elsewhere) == (1, 1), "two were due; one more is owed"
    assert here.claim(8, 20) is None
    assert (here.expired, here.elsewhere) == (0, 0), "the third has come to the other router"
    assert there.claim(7, 2, brought(own[0], 2)) is not None, "its client may still bring it"
    assert here.claims.first.value == 1.0


def test_who_comes_without_takes_none_from_who_brings_one() -> None:
    promises = promised(1.0)
    mine, _ = told(promises, 1), told(promises, 1)
    assert promises.claim(7, 1) is not None
    assert promises.claim(7, 1, brought(mine, 1)) is not None
    assert promises.claim(7, 1) is None
    promises.validate()


def test_more_than_can_be_held_are_counted_and_still_honoured() -> None:
    promises = promised(1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.core.promises.promises.MOST_PROMISES", 2)
        made = [told(promises, 1) for _ in range(3)]
    assert (len(promises), promises.forgotten) == (2, 1)
    assert promises.claim(7, 1, brought(made[2], 1)) is not None
    promises.validate()


@pytest.mark.parametrize("seed", range(5))
def test_each_promise_of_three_routers_ends_in_one_way(seed: int) -> None:
    """Clients come to any router, too early, in time or never, with their promise or without; all
    requests are equal. What routers count together is what became of the clients."""
    random = Random(seed)
    routers = [Promises(ids=iter(range(n * 10**6, (n + 1) * 10**6))) for n in range(3)]
    open_: list[tuple[float, float, ToldPromise]] = []  # when made, when due, what was told
    now_s, claims = 0.0, 0
    for _ in range(600):
        now_s += random.expovariate(20)
        router = random.choice(routers)
        if random.random() < 0.5 or not open_:
            made = router.make(7, work(random.random()), random.uniform(0.1, 3), now_s)
            open_.append((now_s, now_s + made.due_in_s, made))
            continue
        made_s, _, promise = open_.pop(random.randrange(len(open_)))
        bring = brought(promise, now_s - made_s) if random.random() < 0.8 else None
        if router.claim(7, now_s, bring) is not None:
            claims += 1
            outcome = random.random()
            if outcome < 0.2:
                router.give_up()
            else:
                router.settle(kept=outcome < 0.9)
        for one in routers:
            one.validate()
    for one in routers:
        one.claim(8, now_s + 100)
        one.validate()
        assert not len(one)
    assert claims == sum(one.kept + one.broken + one.given_up for one in routers)
    lost = sum(one.expired for one in routers) - sum(one.elsewhere for one in routers)
    assert sum(one.told for one in routers) - claims == lost


def test_times_are_put_off_until_most_are_kept() -> None:
    promises = promised(0.5)
    for turn in range(400):
        promises.settle(kept=promises.delay_s + 0.1 * (turn % 10) > 0.95)
    assert promises.delay_s == pytest.approx(0.9, abs=0.15)
    told = promises.make(1, work(1), soonest_s=3, now_s=0)
    assert told.due_in_s == 3 + promises.delay_s
    assert promises.claim(1, 3) is None, "not before what was told"
    assert promises.kept + promises.broken == 400


# --- in the router -------------------------------------------------------------------------------


def submit(
    core: RouterCore,
    name: str,
    prompt: tuple[int, ...],
    now_s: float,
    *,
    tier: str = "",
    ttft_s: float = 2.5,
) -> list[Command]:
    """A second of prefill, and two may wait for one."""
    asked = replace(
        request(name, max_tokens=2),
        prompt_ids=prompt,
        objectives=Objectives(ttft_s=ttft_s),
        qos_tier=tier,
    )
    return core.handle(Submitted(request=asked), now_s)


def prompt(number: int) -> tuple[int, ...]:
    return tuple(range(number, number + 10))


def busy(tiers: QosTiers = ONE_TIER) -> RouterCore:
    """A prefill worker that takes 0.1 s per token and has two prompts."""
    core = RouterCore(RouterState(tiers=tiers))
    core.state.promises.delay_s = core.state.forecast.ttft.at_first = 0.0
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        core.handle(WorkerJoined(hello=hello(name, role, places=64)), 0)
    core.state.workers[Incarnation("p")].times = PerToken(token_s=0.1)
    core.state.workers[Incarnation("d")].times = PerToken()
    for i in range(2):
        assert isinstance(submit(core, f"r{i}", prompt(i), 0)[0], Send)
    return core


def retry_of(commands: list[Command]) -> float:
    (refuse,) = commands
    assert isinstance(refuse, Refuse)
    assert refuse.refusal.retry_after_s is not None
    return refuse.refusal.retry_after_s


def finish(core: RouterCore, name: str, attempt: int, now_s: float) -> None:
    core.handle(Aborted(request_id=name), now_s)
    for worker in ("p", "d"):
        says(core, worker, Released(key=key(name, attempt), at_s=now_s), now_s=now_s)


def test_later_ones_are_promised_later_times() -> None:
    core = busy()
    core.state.promises.claims.first.value = 1.0
    times = [retry_of(submit(core, f"x{i}", prompt(10 + i), 0)) for i in range(3)]
    assert times == pytest.approx([0.5, 0.5 + EXCESS, 0.5 + 2 * EXCESS], abs=0.02)


def test_others_are_told_as_many_times() -> None:
    """Two sequences of its own beside two of another router's, which tells times as well."""
    core = busy()
    core.state.promises.claims.first.value = 1.0
    counters = Counters(running=4, routers=2)
    core.handle(WorkerSaid(incarnation=Incarnation("d"), events=(), counters=counters), 0)
    times = [retry_of(submit(core, f"x{i}", prompt(10 + i), 0)) for i in range(3)]
    assert times == pytest.approx([0.5, 0.5 + 2 * EXCESS, 0.5 + 4 * EXCESS], abs=0.02)
    finish(core, "r0", 0, 0.6)
    new = submit(core, "new", prompt(20), 0.6, ttft_s=3.5)
    assert isinstance(new[0], Refuse), "another router's client may come before it, too"


def test_who_comes_back_in_time_goes_before_who_comes_anew() -> None:
    core = busy()
    core.state.promises.claims.first.value = 1.0
    again_s = retry_of(submit(core, "x", prompt(10), 0))
    finish(core, "r0", 0, 0.6)
    assert isinstance(submit(core, "new", prompt(20), 0.6)[0], Refuse), "its place is promised"
    assert isinstance(submit(core, "x", prompt(10), max(again_s, 0.6))[0], Send)


def test_what_a_lower_tier_is_to_come_back_for_keeps_no_higher_one_out() -> None:
    tiers = QosTiers(
        tiers=(QosTier(name="premium"), QosTier(name="free", priority=1)), default="free"
    )
    core = busy(tiers)
    core.state.promises.claims.first.value = 1.0
    assert retry_of(submit(core, "x", prompt(10), 0)) == pytest.approx(0.5, abs=0.02)
    finish(core, "r0", 0, 0.6)
    assert isinstance(submit(core, "equal", prompt(20), 0.6)[0], Refuse), "its place is promised"
    (ask,) = submit(core, "higher", prompt(20), 0.6, tier="premium", ttft_s=1.5)
    assert isinstance(ask, Send)


def test_what_became_of_promises_is_counted() -> None:
    core = busy()
    again_s = retry_of(submit(core, "x", prompt(10), 0))
    core.state.workers[Incarnation("p")].times = PerToken(token_s=0.2)
    at_s = again_s + retry_of(submit(core, "x", prompt(10), again_s))
    assert (core.state.promises.kept, core.state.promises.broken) == (0, 1), "it takes longer now"
    core.state.workers[Incarnation("p")].times = PerToken(token_s=0.1)
    finish(core, "r0", 0, at_s)
    finish(core, "r1", 1, at_s)
    (ask,) = submit(core, "x", prompt(10), at_s)
    assert isinstance(ask, Send)
    says(core, "d", Reserved(key=core.state.requests["x"].key, at_s=at_s), now_s=at_s)
    assert (core.state.promises.kept, core.state.promises.broken) == (1, 1)


def test_when_nobody_comes_back_new_ones_are_taken() -> None:
    core = busy()
    core.state.promises.claims.first.value = 0.0
    retry_of(submit(core, "x", prompt(10), 0))
    finish(core, "r0", 0, 0.6)
    assert isinstance(submit(core, "new", prompt(20), 0.6)[0], Send)


# --- margins -------------------------------------------------------------------------------------


def off(margin: Margin, predicted_s: float, actual_s: float, times: int, at_s: float = 0.0) -> None:
    for _ in range(times):
        margin.observe(predicted_s, actual_s, at_s, undisturbed=False)


def test_what_short_ones_are_off_by_says_little_of_long_ones() -> None:
    margin = Margin(confidence=0.95)
    for _ in range(100):
        off(margin, 1.0, 1.1, 1)
        off(margin, 0.01, 0.51, 1)
    assert margin.apply(1.0) == pytest.approx(1.1, abs=0.01)
    assert margin.apply(0.01) == pytest.approx(0.51, abs=0.2)


def test_where_little_is_known_lately_what_is_near_counts_too() -> None:
    margin = Margin(confidence=0.95)
    for _ in range(100):
        off(margin, 1.0, 1.5, 1)
        off(margin, 8.0, 8.8, 1)
    assert margin.apply(32.0) == pytest.approx(32 * 1.1, rel=0.01)
    for number in range(100):
        off(margin, 1.0, 1.5, 1, at_s=float(number))
    assert margin.apply(8.0) == pytest.approx(8 * 1.5, rel=0.1), "nobody dared it for long"


def test_as_long_as_nothing_is_known_some_margin_is_taken() -> None:
    margin = Margin(confidence=0.9, at_first=0.02)
    assert margin.apply(2.0) == pytest.approx(2.04)
    off(margin, 2.0, 2.0, 30)
    assert margin.apply(2.0) == 2.0


@pytest.mark.parametrize(
    ("draw", "confidence"),
    [("normal", 0.9), ("normal", 0.975), ("skew", 0.9), ("skew", 0.975), ("rare", 0.975)],
)
def test_the_margin_covers_the_asked_share_of_requests(draw: str, confidence: float) -> None:
    """Whatever the errors' distribution, when it has been seen for a while."""
    rng, margin = Random(0), Margin(confidence=confidence)
    draws = {
        "normal": lambda: rng.gauss(0.0, 0.2),
        "skew": lambda: rng.expovariate(4.0),
        "rare": lambda: 1.0 if rng.random() < 0.08 else rng.uniform(0.0, 0.05),
    }
    covered, count = 0, 4000
    for number in range(count + 500):
        actual_s = 1.0 + max(-0.5, draws[draw]())
        covered += number >= 500 and actual_s <= margin.apply(1.0)
        off(margin, 1.0, actual_s, 1, at_s=number / 10)
    assert covered / count == pytest.approx(confidence, abs=0.035 if draw == "rare" else 0.015)
    assert margin.growth(2.0) == pytest.approx(margin.apply(2.0) / 2.0)


def test_one_error_moves_it_by_little_however_large_it_is() -> None:
    """The largest of 20 errors is not everybody's margin."""
    rng, margin = Random(1), Margin(confidence=0.975)
    for number in range(30):
        off(margin, 1.0, rng.uniform(1.0, 1.2), 1, at_s=number / 10)
    before_s = margin.apply(1.0)
    off(margin, 1.0, 4.0, 1, at_s=3.0)
    assert before_s < margin.apply(1.0) < before_s + 0.5
    for number in range(200):
        off(margin, 1.0, rng.uniform(1.0, 1.2), 1, at_s=3.0 + number / 10)
    assert margin.apply(1.0) < before_s + 0.15


def test_overhead_is_learnt_where_nothing_was_waited_for() -> None:
    margin = Margin(confidence=0.5)
    for _ in range(200):
        margin.observe(0.1, 0.15, 0.0, undisturbed=True)
    assert margin.overhead_s == pytest.approx(0.05, abs=0.001)
    assert margin.apply(1.0) == pytest.approx(1.05, abs=0.05)


def test_a_disturbance_that_is_over_is_forgotten_though_few_were_admitted_since() -> None:
    margin = Margin(confidence=0.9)
    off(margin, 1.0, 5.0, 64)
    for at_s in range(1, 5):
        off(margin, 1.0, 1.0, 1, at_s=float(at_s))
    assert margin.apply(1.0) == pytest.approx(4.0), "it may come back"
    for at_s in range(5, 180):
        off(margin, 1.0, 1.0, 1, at_s=float(at_s))
    assert margin.apply(1.0) < 1.1


def test_what_is_ahead_at_any_moment_is_the_sum_of_what_is_due_before_it() -> None:
    """Promises are made, claimed and expire, and moments are asked for in any order."""
    promises, random = promised(0.5), Random(5)
    due: dict[int, tuple[float, float, int]] = {}  # digest |-> when, seconds of work, priority
    for digest in range(400):
        now_s = digest / 100
        seconds, after_s, priority = random.random(), random.uniform(0.1, 9), random.randrange(3)
        promises.make(digest, work(seconds), after_s, now_s, priority)
        due[digest] = now_s + after_s, seconds, priority
        taken = random.choice([*due])
        if promises.claim(taken, now_s) is not None:
            del due[taken]
        due = {one: told for one, told in due.items() if told[0] + GRACE_S >= now_s}
        promises.claim(-1, now_s)
        end_s, last = now_s + random.uniform(-1, 5), random.randrange(3)
        ahead = sum(s for when_s, s, of in due.values() if when_s < end_s and of <= last)
        share = promises.claims.first.value
        assert promises.before(end_s, last).prefill_s == pytest.approx(ahead * share)


def test_nothing_is_ahead_once_all_that_were_due_have_come() -> None:
    """Not even what rounding leaves: an idle worker would seem to have a queue."""
    promises = promised(0.5)
    for digest, seconds, due_s in ((1, 0.1, 1), (2, 0.2, 2), (3, 1.0, 100)):
        promises.make(digest, work(seconds), due_s, 0)
    assert promises.before(5).prefill_s == pytest.approx(0.15)
    assert all(promises.claim(digest, 2) for digest in (1, 2))
    assert promises.before(5) == NOTHING_PROMISED


def test_asking_again_does_not_look_at_all_promises_again(monkeypatch: pytest.MonkeyPatch) -> None:
    promises = promised(0.5)
    for digest in range(5_000):
        promises.make(digest, work(1), soonest_s=1 + digest / 1e6, now_s=0)
    assert promises.before(2).prefill_s == pytest.approx(2_500)
    added = 0
    add = Promised.__add__

    def counted(one: Promised, other: Promised) -> Promised:
        nonlocal added
        added += 1
        return add(one, other)

    monkeypatch.setattr(Promised, "__add__", counted)
    for later in range(100):
        promises.before(2 + later / 100)
    assert added <= 200
