"""The ladder of a tier whose latencies leave its objectives: up, down, and what holds it."""

from __future__ import annotations

from dataclasses import replace

from kvrelay.qos import LadderRules, QosTier, QosTiers
from kvrelay.types import Objectives
from router.core.state.ladder import LOOKS_EVERY_S, Ladder, Ladders, LadderStep, Recent

RULES = LadderRules(
    window_s=60, hold_s=10, calm_s=30, stricter=0.8, easing=0.8, tolerance=1.0, tail=2.0
)
TIER = QosTier(name="gold", objectives=Objectives(ttft_s=1.0, tpot_s=0.1))


def ladder(step: LadderStep = LadderStep.NORMAL) -> Ladder:
    return Ladder(tier=TIER, rules=RULES, step=step)


def feed(recent: Recent, seconds: float, *, count: int = 100, now_s: float = 0.0) -> None:
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


def test_a_step_up_says_why_and_is_judged_by_what_came_after_it() -> None:
    one = ladder()
    feed(one.ttft, 1.25)
    assert one.climb(1) == "TTFT p99 is 1250 ms, over 1000 ms"
    assert one.step is LadderStep.TIGHTEN
    assert one.climb(12) is None  # nothing is known since
    feed(one.tpot, 0.15, now_s=5)
    assert one.climb(10.9) is None  # held
    assert one.climb(11) == "TPOT p99 is 150 ms, over 100 ms"
    assert one.climb(21) is None
    feed(one.tpot, 0.15, now_s=21)
    assert one.climb(21) is None and one.step is LadderStep.CAP  # it trips only far outside
    feed(one.tpot, 0.25, now_s=22)
    assert one.climb(22) == "TPOT p99 is 250 ms, over 200 ms"
    assert one.step is LadderStep.TRIP
    feed(one.tpot, 0.25, now_s=40)
    assert one.climb(41) is None and one.step is LadderStep.TRIP


def test_a_little_over_its_objective_is_tolerated() -> None:
    one = Ladder(tier=TIER, rules=replace(RULES, tolerance=1.2))
    feed(one.ttft, 1.19)
    assert one.climb(1) is None
    feed(one.ttft, 1.21)
    assert one.climb(2) == "TTFT p99 is 1210 ms, over 1200 ms"
    one = Ladder(tier=TIER, rules=replace(RULES, tolerance=2.5), step=LadderStep.CAP)
    feed(one.ttft, 2.4)
    assert one.climb(1) is None, "nor does it trip before it tightens"


def test_a_long_tail_counts_too() -> None:
    one = ladder()
    feed(one.ttft, 0.5, count=998)
    feed(one.ttft, 2.5, count=1)
    assert one.climb(1) is None
    one.ttft.observe(0.5, 1)
    assert one.climb(1) == "TTFT p99.9 is 2500 ms, over 2000 ms"


def test_it_falls_only_after_some_calm_well_inside() -> None:
    one = ladder()
    feed(one.ttft, 1.25)
    one.climb(0)
    feed(one.ttft, 0.9, now_s=20)  # inside, but near
    assert [one.climb(t) for t in (20, 40, 60, 79)] == [None] * 4
    assert one.step is LadderStep.TIGHTEN
    assert one.falls_in_s(79) == 30
    assert one.climb(81) is None  # the window is empty: calm since 79
    assert one.climb(109) == "well inside its objectives for 30 s"
    assert one.step is LadderStep.NORMAL
    assert one.climb(300) is None


def test_few_latencies_are_enough_to_stay() -> None:
    """A tier of few requests does not come down upon those that it has not had."""
    one = ladder()
    feed(one.ttft, 1.25)
    one.climb(0)
    feed(one.ttft, 0.85, count=1, now_s=25)
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
        "well inside its objectives for 30 s",
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
        ("gold", "TPOT p99 is 200 ms, over 100 ms")
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
    assert list(one.ttft._ascending) == list(one.tpot._ascending) == [9.0]


def test_it_looks_now_and_then() -> None:
    ladders = Ladders(QosTiers(tiers=(TIER,), default="gold", ladder=RULES))
    assert ladders.climb(0) == []
    for _ in range(100):
        ladders.saw_tpot("gold", 0.2, begun_s=0, now_s=0)
    assert ladders.climb(LOOKS_EVERY_S / 2) == []
    assert len(ladders.climb(LOOKS_EVERY_S)) == 1
