"""Before a request is refused: less output, a wait; and what a tier's ladder takes from it."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest

from engine.core.step_times import StepTimes
from kvrelay.counters import Counters, TierLoad
from kvrelay.messages import Reserve, ReserveRefused
from kvrelay.qos import LadderRules, QosTier, QosTiers
from kvrelay.types import FinishReason, Incarnation, Objectives, Role, Sampling
from router.core.core import RouterCore
from router.core.decision import capped, deferred, less_output_helps, stricter, ways
from router.core.events import (
    Aborted,
    Command,
    Deliver,
    LadderStepped,
    Refuse,
    Send,
    Submitted,
    WorkerJoined,
    WorkerLost,
    WorkerSaid,
)
from router.core.promises.refusal import Refusal
from router.core.router_state import RouterState
from router.core.state.ladder import LadderStep
from tests.unit.router_kit import PerToken, demand, hello, released, request, reserved, says, tokens

D = Incarnation("d")
TIGHT = Refusal(reason="tpot_unreachable", message="too slow", retry_after_s=0.4)
SHORT = QosTier(name="short", capped_tokens=4)
PATIENT = QosTier(name="patient", patience_s=1.0)


class TestLessOutput:
    def test_caps_what_is_asked_and_expected(self) -> None:
        less = capped(demand(output_tokens=8), SHORT)
        assert less is not None
        assert (less.spec.sampling.max_tokens, less.output_tokens) == (4, 4)
        assert (less.spec.prompt_ids, less.objectives) == ((0, 1, 2), Objectives())

    def test_who_is_expected_to_end_sooner_still_is(self) -> None:
        asked = demand(output_tokens=8)
        less = capped(replace(asked, output_tokens=2), SHORT)
        assert less is not None
        assert (less.spec.sampling.max_tokens, less.output_tokens) == (4, 2)

    @pytest.mark.parametrize(
        ("output", "least", "tier"), [(4, 0, "short"), (8, 5, "short"), (8, 0, "free")]
    )
    def test_where_nothing_may_be_cut(self, output: int, least: int, tier: str) -> None:
        asked = demand(output_tokens=output)
        sampling = replace(asked.spec.sampling, min_tokens=least)
        asked = replace(asked, spec=replace(asked.spec, sampling=sampling))
        assert capped(asked, SHORT if tier == "short" else QosTier(name=tier)) is None

    def test_comes_second_until_the_ladder_caps(self) -> None:
        asked = demand(output_tokens=8)
        lengths = {
            step: [way.spec.sampling.max_tokens for way in ways(asked, SHORT, step)]
            for step in LadderStep
        }
        assert lengths == {0: [8, 4], 1: [8, 4], 2: [4], 3: [4]}
        assert list(ways(asked, PATIENT, LadderStep.TRIP)) == [asked]

    def test_helps_against_what_output_costs(self) -> None:
        helps = {
            reason: less_output_helps(Refusal(reason=reason, message=""))
            for reason in (
                "tpot_unreachable",
                "kv_exhausted",
                "deadline_unreachable",
                "ttft_unreachable",
                "no_capacity",
            )
        }
        assert list(helps.values()) == [True, True, True, False, False]


class TestWaiting:
    def test_for_what_is_left_of_its_patience(self) -> None:
        verdict = deferred(TIGHT, PATIENT, 0.25)
        assert verdict is not None
        assert (verdict.refusal, verdict.patience_s) == (TIGHT, 0.75)

    @pytest.mark.parametrize(
        ("change", "waited_s"),
        [
            ({"hopeless": True}, 0.0),
            ({"reason": "ttft_unreachable"}, 0.0),
            ({"reason": "no_capacity"}, 0.0),
            ({"retry_after_s": 1.5}, 0.0),
            ({}, 0.7),
            ({"retry_after_s": None}, 1.0),
        ],
    )
    def test_never_in_vain(self, change: dict[str, object], waited_s: float) -> None:
        assert deferred(replace(TIGHT, **change), PATIENT, waited_s) is None  # type: ignore[arg-type]

    def test_not_where_the_tier_has_no_patience(self) -> None:
        assert deferred(TIGHT, SHORT, 0.0) is None


def test_stricter_leaves_the_deadline() -> None:
    asked = replace(demand(), objectives=Objectives(ttft_s=1.0, tpot_s=0.1, deadline_s=9.0))
    judged = stricter(asked, LadderRules(stricter=0.5)).objectives
    assert judged == Objectives(ttft_s=0.5, tpot_s=0.05, deadline_s=9.0)


# --- in the core --------------------------------------------------------------------------------

GOLD = QosTier(
    name="gold",
    share=0.25,
    objectives=Objectives(tpot_s=0.25),
    capped_tokens=4,
)
FREE = QosTier(name="free", priority=1, patience_s=1.0)
RULES = LadderRules(hold_s=1, calm_s=5, stricter=0.8)
TIERS = QosTiers(tiers=(GOLD, FREE), default="free", ladder=RULES)


def core(times: StepTimes, *, places: int = 4) -> RouterCore:
    """One prefill and one decode worker."""
    core = RouterCore(RouterState(tiers=TIERS))
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        core.handle(WorkerJoined(hello=hello(name, role, places=places)), 0)
    core.state.workers[D].times = times
    return core


def submit(
    core: RouterCore, name: str, tier: str, *, n: int = 1, most: int = 40, now_s: float = 1.0
) -> list[Command]:
    asked = replace(request(name, n=n, max_tokens=most), qos_tier=tier)
    return core.handle(Submitted(request=asked), now_s)


def asked_for(commands: list[Command]) -> list[Sampling]:
    sent = [c.message for c in commands if isinstance(c, Send)]
    return [m.spec.sampling for m in sent if isinstance(m, Reserve)]


def refusals(commands: list[Command]) -> list[Refusal]:
    return [c.refusal for c in commands if isinstance(c, Refuse)]


def test_output_is_cut_when_all_of_it_would_be_too_slow() -> None:
    """40 tokens: a context of 23 on average, 230 ms for each; with 4 it is 5."""
    at = core(PerToken(context_s=0.012))
    (sampling,) = asked_for(submit(at, "r", "gold"))
    assert (sampling.max_tokens, at.state.requests["r"].capped_tokens) == (4, 4)
    says(at, "d", reserved("r"))
    ended = says(at, "p", tokens(0, 1, 2, 3, 4, name="r", reason=FinishReason.LENGTH))
    assert [c.done for c in ended if isinstance(c, Deliver)] == [True]


def test_less_output_is_not_judged_where_no_more_was_expected() -> None:
    """Requests of the tier have had 3 tokens: to be cut to 4 changes nothing."""
    at = core(PerToken(context_s=0.012, sequence_s=0.25))
    for _ in range(20):
        at.state.lengths.observe("gold", 3, was_cut=False)
    judge = Mock(wraps=at.state.admitting.judge)
    at.state.admitting = Mock(judge=judge)
    (refusal,) = refusals(submit(at, "r", "gold"))
    assert (refusal.reason, judge.call_count) == ("tpot_unreachable", 1)


def test_nothing_is_cut_any_more_where_another_worker_can_serve_all_of_it() -> None:
    at = core(PerToken(context_s=0.012))
    (sampling,) = asked_for(submit(at, "r", "gold"))
    assert sampling.max_tokens == 4
    at.handle(WorkerJoined(hello=hello("e", Role.DECODE)), 1.1)
    at.state.workers[Incarnation("e")].times = PerToken()
    refused = ReserveRefused(key=at.state.requests["r"].key, at_s=1.2, reason="kv_exhausted")
    (sampling,) = asked_for(says(at, "d", refused, now_s=1.2))
    assert (sampling.max_tokens, at.state.requests["r"].capped_tokens) == (40, None)


def test_nothing_is_cut_when_it_need_not_be_or_does_not_help() -> None:
    at = core(PerToken(context_s=0.001))
    (sampling,) = asked_for(submit(at, "r", "gold"))
    assert (sampling.max_tokens, at.state.requests["r"].capped_tokens) == (40, None)
    at = core(PerToken(sequence_s=0.3))
    (refusal,) = refusals(submit(at, "r", "gold"))
    assert (refusal.reason, refusal.hopeless) == ("tpot_unreachable", True)


def test_a_deferred_request_is_served_once_it_can_be() -> None:
    at = core(PerToken(), places=1)
    submit(at, "first", "gold")
    says(at, "d", reserved("first"))
    assert submit(at, "r", "free") == []
    assert "r" in at.state.waiting
    at.validate()
    says(at, "p", tokens(0, 1, name="first", reason=FinishReason.LENGTH), now_s=1.5)
    commands = says(at, "d", released("first"), now_s=1.51)
    assert len(asked_for(commands)) == 1, "at once"
    says(at, "d", reserved("r", attempt=1), now_s=2)
    assert "r" not in at.state.waiting


def test_two_slots_that_come_free_together_are_taken_together() -> None:
    at = core(PerToken(), places=2)
    for name in ("first", "second"):
        submit(at, name, "gold")
    for name in ("third", "fourth", "fifth"):
        assert submit(at, name, "free") == []
    for name in ("first", "second"):
        at.handle(Aborted(request_id=name), 1.1)
    commands = says(at, "d", released("first"), released("second", attempt=1), now_s=1.1)
    assert len(asked_for(commands)) == 2
    at.validate()


def test_a_deferred_request_is_refused_when_its_patience_is_over() -> None:
    at = core(PerToken(), places=1)
    submit(at, "first", "gold")
    assert submit(at, "r", "free") == []
    assert says(at, "p", now_s=1.9) == []
    (refusal,) = refusals(says(at, "p", now_s=2.2))
    assert refusal.reason == "slots_exhausted"
    assert "r" not in at.state.requests and "r" not in at.state.waiting


def test_deferred_requests_of_a_tier_wait_for_the_first_of_them() -> None:
    at = core(PerToken(), places=4)
    for i in range(3):
        submit(at, str(i), "gold", most=4)
    assert submit(at, "wide", "free", n=3, most=4) == []
    assert submit(at, "less", "free", n=2, most=4) == []
    at.handle(Aborted(request_id="0"), 1.1)
    says(at, "d", released("0"), now_s=1.1)
    assert asked_for(says(at, "p", now_s=1.3)) == []  # there is room for the second one
    at.handle(Aborted(request_id="1"), 1.4)
    ended = says(at, "d", released("1", attempt=1), now_s=1.4)
    assert [one.n for one in asked_for(ended)] == [3]


def test_a_deferred_request_whose_workers_are_all_gone_is_refused() -> None:
    at = core(PerToken(), places=1)
    submit(at, "first", "gold")
    assert submit(at, "r", "free") == []
    at.handle(WorkerLost(incarnation=D), 1.1)
    commands = at.handle(WorkerLost(incarnation=Incarnation("p")), 1.3)
    assert "r" in [c.request_id for c in commands if isinstance(c, Refuse)]
    assert "r" not in at.state.requests and "r" not in at.state.waiting


def test_without_patience_it_is_refused_at_once() -> None:
    at = core(PerToken(), places=1)
    submit(at, "first", "free")
    (refusal,) = refusals(submit(at, "r", "gold"))
    assert refusal.reason == "slots_exhausted"


def slow_down(at: RouterCore, now_s: float) -> list[Command]:
    for _ in range(100):
        at.state.ladders.saw_tpot("gold", 0.6, begun_s=now_s, now_s=now_s)
    return says(at, "p", now_s=now_s)


def test_the_ladder_tightens_then_caps_then_trips() -> None:
    at = core(PerToken(sequence_s=0.22), places=8)
    assert len(asked_for(submit(at, "before", "gold"))) == 1
    at.handle(Aborted(request_id="before"), 1.5)
    says(at, "d", released("before"), now_s=1.5)
    cause = "TPOT of 100 of 100 was over 250 ms"
    assert slow_down(at, 2) == [LadderStepped(tier="gold", step=1, cause=cause)]
    (refusal,) = refusals(submit(at, "tight", "gold", now_s=2.1))
    assert (refusal.reason, refusal.hopeless) == ("tpot_unreachable", False)
    assert refusal.retry_after_s is not None
    at.state.workers[D].times = PerToken(sequence_s=0.01)
    assert slow_down(at, 3.2) == [LadderStepped(tier="gold", step=2, cause=cause)]
    assert len(asked_for(submit(at, "other", "free", now_s=3.25))) == 1
    (sampling,) = asked_for(submit(at, "a", "gold", now_s=3.3))
    assert sampling.max_tokens == 4
    far = "TPOT of 100 of 100 was over 500 ms"
    assert slow_down(at, 4.4) == [LadderStepped(tier="gold", step=3, cause=far)]
    assert len(asked_for(submit(at, "b", "gold", now_s=4.5))) == 1  # 2 of 8 places are reserved
    (refusal,) = refusals(submit(at, "c", "gold", now_s=4.9))
    assert refusal.reason == "tier_share_exhausted"
    assert refusal.retry_after_s == pytest.approx(4.4 + 5 - 4.9)
    assert "only the reserve of tier gold" in refusal.message
    assert "until its latencies" in refusal.message
    (lower,) = refusals(submit(at, "d", "free", now_s=4.9))
    assert "the reserve of tier free is served until gold's latencies" in lower.message


def test_a_tripped_tier_without_reserve_is_served_one_by_one() -> None:
    at = core(PerToken(sequence_s=0.01), places=8)
    for step in (1, 2, 3):
        slow_down(at, 1.2 * step)
    assert len(asked_for(submit(at, "a", "free", now_s=4.0))) == 1
    (refusal,) = refusals(submit(at, "b", "free", now_s=4.1))
    assert refusal.reason == "tier_share_exhausted"
    at.handle(Aborted(request_id="a"), 4.2)
    says(at, "d", released("a"), now_s=4.2)
    assert len(asked_for(submit(at, "b", "free", now_s=4.3))) == 1


def test_a_reserve_is_that_of_all_routers() -> None:
    at = core(PerToken(sequence_s=0.01), places=8)
    for step in (1, 2, 3):
        slow_down(at, 1.2 * step)
    told = Counters(tiers=(TierLoad(tier="gold", running=1, waiting=0),))
    at.handle(WorkerSaid(incarnation=D, events=(), counters=told), 4.0)
    assert len(asked_for(submit(at, "a", "gold", now_s=4.1))) == 1  # 2 of 8 places are reserved
    told = Counters(tiers=(TierLoad(tier="gold", running=2, waiting=0),))
    at.handle(WorkerSaid(incarnation=D, events=(), counters=told), 4.2)
    (refusal,) = refusals(submit(at, "b", "gold", now_s=4.3))
    assert refusal.reason == "tier_share_exhausted"


def test_latencies_of_requests_with_their_own_objectives_do_not_count() -> None:
    at = core(PerToken(), places=4)
    own = replace(request("own"), qos_tier="gold", objectives=Objectives(tpot_s=9.0))
    for name, asked in (("own", own), ("r", replace(request("r"), qos_tier="gold"))):
        at.handle(Submitted(request=asked), 1)
        attempt = at.state.requests[name].attempt
        says(at, "d", reserved(name, attempt))
        says(at, "p", tokens(0, 1, name=name, attempt=attempt), now_s=2)
        last = tokens(1, 2, 3, 4, name=name, attempt=attempt, reason=FinishReason.LENGTH)
        says(at, "d", last, now_s=5)
    (gold,) = at.state.ladders
    assert gold.tpot is not None and gold.tpot.over.known == 1
    assert gold.ttft is None
