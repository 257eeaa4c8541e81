"""The ladder of a tier whose latencies leave its objectives: up, down, and what holds it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from kvrelay.qos import LadderRules, QosTier, QosTiers
from kvrelay.types import Objectives
from router.core.state.ladder import (
    FEWEST,
    GROUP,
    LOOKS_EVERY_S,
    Ladder,
    Ladders,
    LadderStep,
    Misses,
    Recent,
    Watched,
)

RULES = LadderRules(window_s=60, hold_s=10, calm_s=30, stricter=0.8, missed=0.025, tail=2.0)
TIER = QosTier(name="gold", objectives=Objectives(ttft_s=1.0, tpot_s=0.1))


def ladder(step: LadderStep = LadderStep.NORMAL) -> Ladder:
    return Ladder(tier=TIER, rules=RULES, step=step)


def feed(
    recent: Recent | Watched | None, seconds: float, *, count: int = 100, now_s: float = 0.0
) -> None:
    assert recent is not None
    for _ in range(count):
        recent.observe(seconds, now_s)


def test_it_takes_a_hundred_latencies_to_know_a_p99() -> None:
    recent = Recent(window_s=60)
    feed(recent, 1.0, count=98)
    recent.observe(5.0, 0)
    assert recent.quantile(0.99, 0) is None
    recent.observe(3.0, 0)
    assert recent.quantile(0.99, 0) == 5.0
    assert recent.quantile(0.98, 0) == 3.0
    assert recent.quantile(0.999, 0) is None


def test_latencies_leave_the_window() -> None:
    recent = Recent(window_s=60)
    feed(recent, 5.0, now_s=0)
    feed(recent, 1.0, now_s=30)
    assert recent.quantile(0.99, 60) == 5.0
    assert recent.quantile(0.99, 61) == 1.0
    assert recent.quantile(0.5, 91) is None


# --- how many missed it ---------------------------------------------------------------------------


def test_a_share_is_known_of_a_hundred_on() -> None:
    misses = Misses(bound_s=1.0, window_s=60)
    for _ in range(FEWEST - 1):
        misses.observe(2.0, 0)
    assert (misses.share, misses.at_least) == (1.0, 0.0)
    misses.observe(2.0, 0)
    assert (misses.known, misses.share, misses.at_least) == (100, 1.0, 1.0)


def test_one_bad_moment_is_no_evidence() -> None:
    """All requests of a second are late for one reason."""
    misses = Misses(bound_s=1.0, window_s=60)
    for number in range(20 * GROUP):
        misses.observe(2.0 if 50 <= number < 75 else 0.5, number / 10)
    assert misses.share == pytest.approx(0.05)
    assert misses.at_least < 0
    spread = Misses(bound_s=1.0, window_s=60)
    for number in range(20 * GROUP):
        spread.observe(2.0 if number % 20 == 0 else 0.5, number / 10)
    assert spread.share == pytest.approx(0.05)
    assert spread.at_least > 0.03


def test_what_was_missed_leaves_the_window() -> None:
    misses = Misses(bound_s=1.0, window_s=60)
    for at_s in (0, 30):
        for number in range(FEWEST + 1):
            misses.observe(2.0 if number % 2 else 0.5, at_s)
    misses.look(60)
    assert misses.known == 202
    misses.look(60.1)
    assert misses.known == 102 and misses.share == pytest.approx(50 / 102)
    misses.look(90.1)
    assert (misses.known, misses.share, misses.at_least) == (0, 0.0, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_what_admission_lets_through_moves_no_level(seed: int) -> None:
    """For 10 minutes of 10 requests a second as many miss it as may, each or several in a row."""
    rng = Random(seed)
    for burst in (1, 10):
        one, changes, late = ladder(), 0, 0
        for number in range(6000):
            at_s = number / 10
            if not late and rng.random() < RULES.missed / burst:
                late = burst
            feed(one.ttft, 1.5 if late else 0.5, count=1, now_s=at_s)
            late = max(0, late - 1)
            changes += one.climb(at_s) is not None
        assert changes <= 2, burst


@pytest.mark.parametrize("seed", range(5))
def test_a_level_changes_upwards_on_no_fewer_than_a_hundred(seed: int) -> None:
    rng, one = Random(seed), ladder()
    since = 0
    for number in range(4000):
        at_s = number * rng.uniform(0.0, 0.2)
        feed(one.ttft, rng.choice((0.5, 0.5, 1.5, 3.0)), count=1, now_s=number / 10)
        since += 1
        before = one.step
        if one.climb(number / 10) is not None:
            assert one.step < before or since >= FEWEST, at_s
            since = 0


def test_two_late_tokens_of_178_tighten_nothing() -> None:
    one = ladder()
    feed(one.tpot, 0.05, count=88)
    feed(one.tpot, 0.3, count=2)
    feed(one.tpot, 0.05, count=88)
    assert one.climb(1) is None


# --- steps ----------------------------------------------------------------------------------------


def test_a_step_up_says_why_and_is_judged_by_what_came_after_it() -> None:
    one = ladder()
    feed(one.ttft, 1.25)
    assert one.climb(1) == "TTFT of 100 of 100 was over 1000 ms"
    assert one.step is LadderStep.TIGHTEN
    assert one.climb(12) is None  # nothing is known since
    feed(one.tpot, 0.15, now_s=5)
    assert one.climb(10.9) is None  # held
    assert one.climb(11) == "TPOT of 100 of 100 was over 100 ms"
    assert one.climb(21) is None
    feed(one.tpot, 0.15, now_s=21)
    assert one.climb(21) is None and one.step is LadderStep.CAP  # it trips only far outside
    feed(one.tpot, 0.25, count=100, now_s=22)
    assert one.climb(22) is None, "half of 200, in one go"
    feed(one.tpot, 0.25, count=300, now_s=23)
    assert one.climb(23) == "TPOT of 400 of 500 was over 200 ms"
    assert one.step is LadderStep.TRIP
    feed(one.tpot, 0.25, now_s=40)
    assert one.climb(41) is None and one.step is LadderStep.TRIP


def test_it_falls_only_after_some_calm_within_its_objectives() -> None:
    one = ladder()
    feed(one.ttft, 1.25)
    one.climb(0)
    feed(one.ttft, 0.9, now_s=20)
    feed(one.ttft, 1.1, count=3, now_s=20)
    assert [one.climb(t) for t in (20, 40, 60, 79)] == [None] * 4
    assert one.step is LadderStep.TIGHTEN
    assert one.falls_in_s(79) == 30
    assert one.climb(81) is None  # the window is empty: calm since 79
    assert one.climb(109) == "within its objectives for 30 s"
    assert one.step is LadderStep.NORMAL
    assert one.climb(300) is None


def test_few_latencies_are_enough_to_stay() -> None:
    """A tier of few requests does not come down upon those that it has not had."""
    one = ladder()
    feed(one.ttft, 1.25)
    one.climb(0)
    feed(one.ttft, 1.05, count=1, now_s=25)
    assert [one.climb(t) for t in (30, 84)] == [None] * 2
    assert one.falls_in_s(84) == 30
    feed(one.ttft, 0.75, count=99, now_s=90)
    assert one.climb(113) is None
    assert one.climb(114) is not None


def test_a_tripped_tier_without_requests_comes_back_step_by_step() -> None:
    one = ladder(LadderStep.TRIP)
    assert one.climb(0) is not None  # it has been calm for ever
    assert [one.climb(t) for t in (29, 30, 59)] == [
        None,
        "within its objectives for 30 s",
        None,
    ]
    assert one.climb(60) is not None
    assert one.step is LadderStep.NORMAL


def test_only_tiers_with_objectives_have_one() -> None:
    assert list(Ladders(QosTiers())) == []
    tiers = QosTiers(tiers=(TIER, QosTier(name="free")), default="free", ladder=RULES)
    assert [one.tier for one in Ladders(tiers)] == [TIER]
    Ladders(tiers).saw_ttft("free", 1.0, begun_s=0, now_s=0)


def test_without_rules_there_is_none() -> None:
    ladders = Ladders(QosTiers(tiers=(TIER,), default="gold", ladder=None))
    assert list(ladders) == []
    for _ in range(100):
        ladders.saw_ttft("gold", 9.0, begun_s=0, now_s=0)
    assert ladders.climb(0) == []
    assert ladders.highest(TIER) is None


def test_a_step_holds_for_tiers_that_go_after_it_too() -> None:
    free = QosTier(name="free", priority=1)
    ladders = Ladders(QosTiers(tiers=(TIER, free), default="free", ladder=RULES))
    assert ladders.highest(free) is None
    for _ in range(100):
        ladders.saw_tpot("gold", 0.2, begun_s=0, now_s=0)
    assert [(one.tier.name, cause) for one, cause in ladders.climb(0)] == [
        ("gold", "TPOT of 100 of 100 was over 100 ms")
    ]
    assert ladders.highest(free) is ladders.highest(TIER) is not None
    assert ladders.highest(QosTier(name="equal")) is None


def test_of_several_the_one_that_has_climbed_most_holds() -> None:
    silver, free = QosTier(name="silver", priority=1, objectives=TIER.objectives), "free"
    last = QosTier(name=free, priority=2)
    ladders = Ladders(QosTiers(tiers=(TIER, silver, last), default=free, ladder=RULES))
    gold_s, silver_s = ladders
    gold_s.step, silver_s.step = LadderStep.TIGHTEN, LadderStep.TRIP
    assert ladders.highest(last) is silver_s
    assert ladders.highest(TIER) is gold_s


def test_requests_that_were_there_before_a_step_do_not_count() -> None:
    ladders = Ladders(QosTiers(tiers=(TIER,), default="gold", ladder=RULES))
    (one,) = ladders
    feed(one.ttft, 1.25)
    assert ladders.climb(5)
    for begun_s in (4.9, 5.0):
        ladders.saw_ttft("gold", 9.0, begun_s=begun_s, now_s=8)
        ladders.saw_tpot("gold", 9.0, begun_s=begun_s, now_s=8)
    assert [each.over.known for each in one.watched] == [1, 1]


def test_a_tier_is_judged_by_the_objectives_it_has() -> None:
    only = Ladder(tier=replace(TIER, objectives=Objectives(ttft_s=1.0)), rules=RULES)
    assert only.tpot is None and [one.kind for one in only.watched] == ["TTFT"]


def test_it_looks_now_and_then() -> None:
    ladders = Ladders(QosTiers(tiers=(TIER,), default="gold", ladder=RULES))
    assert ladders.climb(0) == []
    for _ in range(100):
        ladders.saw_tpot("gold", 0.2, begun_s=0, now_s=0)
    assert ladders.climb(LOOKS_EVERY_S / 2) == []
    assert len(ladders.climb(LOOKS_EVERY_S)) == 1
