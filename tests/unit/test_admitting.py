from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from kvrelay.counters import Counters, LinkState
from kvrelay.types import Incarnation, Objectives, Role
from router.core.load.decode_outlook import BatchThen, Expected
from router.core.load.prefill_queue import Ahead
from router.core.policy import predictive
from router.core.policy.admission import (
    ANY_NUMBER,
    AdmissionPolicy,
    Admitted,
    Capacity,
    Deferred,
    Verdict,
)
from router.core.policy.admission_baselines import EarlyRejection, QueueLimit, Unlimited
from router.core.policy.forecast import Forecast, step_with
from router.core.policy.predictive import Predictive, fewest
from router.core.promises.promises import ReleaseClock
from router.core.promises.refusal import NO_CAPACITY, Refusal, refused_by_worker
from router.core.state.candidate import Candidate
from router.core.state.demand import Demand
from router.core.state.worker_view import BELIEVED, WorkerView
from router.core.workers import book_decode, book_prefill
from tests.unit.router_kit import PerToken, demand, key, view, workers_of

P, D = Role.PREFILL, Role.DECODE


def pair(places: int = 4) -> tuple[WorkerView, WorkerView]:
    """10 ms for a token of a prompt, 100 ms for each sequence of a batch."""
    p, d = view("p", P), view("d", D, places=places)
    p.times, d.times = PerToken(token_s=0.01), PerToken(sequence_s=0.1)
    return p, d


def judge(
    policy: AdmissionPolicy, p: WorkerView, *decodes: WorkerView, asked: Demand, now_s: float = 0.0
) -> Verdict:
    candidates = [Candidate(decode=d, prefill=p) for d in decodes]
    forecast = Forecast(workers_of(p, *decodes))
    return policy.judge(asked, candidates, NO_CAPACITY, forecast, now_s)


def refusal_of(verdict: Verdict) -> Refusal:
    assert isinstance(verdict, Refusal), verdict
    return verdict


def fill(d: WorkerView, *ends_s: float, joins_s: float = 0.0, tpot_s: float | None = None) -> None:
    for i, end_s in enumerate(ends_s):
        expected = Expected(joins_s=joins_s, ends_s=end_s, tokens=4, tpot_s=tpot_s)
        d.outlook.add(key(f"{joins_s} {i}"), expected)


def queue(p: WorkerView, seconds: float) -> None:
    p.queue.add(key("ahead"), Ahead(seconds=seconds, tokens=1), 0)


@pytest.mark.parametrize("policy", [Capacity(), QueueLimit(2), EarlyRejection(), Predictive()])
class TestWhoeverRefuses:
    @pytest.mark.parametrize(("taken", "n", "is_full"), [(3, 1, 0), (3, 2, 1), (4, 1, 1)])
    def test_for_want_of_a_place(
        self, policy: AdmissionPolicy, taken: int, n: int, is_full: int
    ) -> None:
        p, d = pair()
        fill(d, *range(10, 10 + taken))
        verdict = judge(policy, p, d, asked=demand(n=n))
        assert isinstance(verdict, Refusal) == bool(is_full)
        if isinstance(verdict, Refusal):
            assert verdict.reason == "slots_exhausted"
            assert verdict.message == "all 4 places of every decode worker are taken"

    def test_takes_the_next_way(self, policy: AdmissionPolicy) -> None:
        p, d = pair(places=1)
        fill(d, 10)
        other = view("other", D)
        verdict = judge(policy, p, d, other, asked=demand())
        assert isinstance(verdict, Admitted)
        assert verdict.candidate.decode is other

    def test_says_otherwise_without_any_way(self, policy: AdmissionPolicy) -> None:
        assert judge(policy, view("p", P), asked=demand()) is NO_CAPACITY


def test_unlimited_lets_it_wait_forever() -> None:
    p, d = pair(places=1)
    fill(d, 10)
    verdict = judge(Unlimited(), p, d, asked=demand(ttft_s=0.001))
    assert isinstance(verdict, Deferred)
    assert verdict.patience_s == inf
    assert judge(Unlimited(), p, asked=demand()) is NO_CAPACITY


@pytest.mark.parametrize("policy", [Unlimited(), QueueLimit(2), EarlyRejection()])
def test_who_promises_no_pace_leaves_none_to_the_worker(policy: AdmissionPolicy) -> None:
    verdict = judge(policy, *pair(), asked=demand(tpot_s=9.0))
    assert isinstance(verdict, Admitted)
    assert verdict.counted == ANY_NUMBER


def test_queue_limit_counts_prompts() -> None:
    p, d = pair()
    queue(p, 1)
    assert isinstance(judge(QueueLimit(2), p, d, asked=demand()), Admitted)
    assert refusal_of(judge(QueueLimit(1), p, d, asked=demand())).reason == "ttft_unreachable"
    p.counters = Counters(waiting=2)
    assert refusal_of(judge(QueueLimit(2), p, d, asked=demand())).reason == "ttft_unreachable"


def test_early_rejection_sees_the_load_of_now_and_predictive_that_of_then() -> None:
    p, d = pair()
    fill(d, 60, 60, joins_s=1)  # on their way
    queue(p, 2)
    asked = demand(tpot_s=0.25)
    assert isinstance(judge(EarlyRejection(), p, d, asked=asked), Admitted)
    assert refusal_of(judge(Predictive(), p, d, asked=asked)).reason == "tpot_unreachable"
    p, d = pair()
    fill(d, 1, 1)  # gone by then
    queue(p, 2)
    assert refusal_of(judge(EarlyRejection(), p, d, asked=asked)).reason == "tpot_unreachable"
    assert isinstance(judge(Predictive(), p, d, asked=asked), Admitted)


class TestPredictive:
    def test_ttft_counts_what_was_waited_already(self) -> None:
        p, d = pair()
        queue(p, 1.0)
        assert isinstance(judge(Predictive(), p, d, asked=demand(ttft_s=1.05)), Admitted)
        late = refusal_of(judge(Predictive(), p, d, asked=demand(ttft_s=1.05, waited_s=0.1)))
        assert late.reason == "ttft_unreachable"
        assert late.message == (
            "its first token would take 1130 ms, 30 ms without a queue; asked for 1050 ms"
        )

    def test_comes_back_when_the_queue_is_short_enough(self) -> None:
        p, d = pair()
        queue(p, 2.0)
        asked = demand(ttft_s=0.5)
        again_s = refusal_of(judge(Predictive(), p, d, asked=asked)).retry_after_s
        assert again_s is not None and again_s == pytest.approx(2.03 - 0.5)
        assert isinstance(judge(Predictive(), p, d, asked=asked, now_s=again_s + 1e-9), Admitted)

    def test_an_impossible_objective_is_told_as_such(self) -> None:
        refusal = refusal_of(judge(Predictive(), *pair(), asked=demand(ttft_s=0.02)))
        assert refusal.hopeless
        assert refusal.retry_after_s is None

    def test_it_breaks_nobody_elses_objective(self) -> None:
        p, d = pair()
        fill(d, 50, tpot_s=0.15)
        assert refusal_of(judge(Predictive(), p, d, asked=demand())).reason == "tpot_unreachable"
        assert isinstance(judge(Predictive(), *pair(), asked=demand()), Admitted)

    def test_its_handoff_counts_to_its_own_pace_alone(self) -> None:
        """0.4 s of handoff for two further tokens, beside a sequence whose pace is not touched."""
        p, d = pair()
        fill(d, 50, tpot_s=0.25)
        link = LinkState(peer=Incarnation("d"), transport="t", bytes_per_s=1e12, latency_s=0.4)
        p.counters = Counters(links=(link,))
        asked = demand(output_tokens=3, tpot_s=0.41)
        assert isinstance(judge(Predictive(), p, d, asked=asked), Admitted)
        refusal = refusal_of(judge(Predictive(), p, d, asked=demand(output_tokens=3, tpot_s=0.35)))
        assert (refusal.reason, refusal.hopeless) == ("tpot_unreachable", False)
        refusal = refusal_of(judge(Predictive(), p, d, asked=demand(output_tokens=3, tpot_s=0.2)))
        assert refusal.hopeless

    def test_one_token_has_no_pace(self) -> None:
        p, d = pair()
        fill(d, 50, tpot_s=0.15)
        asked = demand(output_tokens=1, tpot_s=0.01)
        assert isinstance(judge(Predictive(), p, d, asked=asked), Admitted)
        assert refusal_of(
            judge(Predictive(), p, d, asked=demand(output_tokens=2, tpot_s=0.01))
        ).hopeless

    def test_tells_beside_how_many_it_has_judged_a_pace(self) -> None:
        p, d = pair()
        fill(d, 10, 20)
        for tpot_s, counted in ((None, None), (1.0, 2)):
            verdict = judge(Predictive(), p, d, asked=demand(tpot_s=tpot_s))
            assert isinstance(verdict, Admitted) and verdict.counted == counted
        d.counters = Counters(running=3)
        verdict = judge(Predictive(), p, d, asked=demand(tpot_s=1.0))
        assert isinstance(verdict, Admitted) and verdict.counted == 3

    def test_comes_back_when_enough_have_ended(self) -> None:
        p, d = pair()
        fill(d, 10, 20, 30)
        asked = demand(tpot_s=0.25)
        again_s = refusal_of(judge(Predictive(), p, d, asked=asked)).retry_after_s
        assert again_s == pytest.approx(20, abs=0.1)
        assert again_s is not None
        d.outlook.remove(key("0.0 0"))
        assert isinstance(judge(Predictive(), p, d, asked=asked, now_s=again_s), Admitted)

    def test_one_with_a_long_prompt_leaves_room_for_several_others(self) -> None:
        """0.1 s for each sequence and 0.01 s for each token; prompts have 5 tokens usually. One of
        10 takes 0.21 s, a usual one 0.16, so there is to be room for 0.21 s (21 / 16)² times."""
        p, d = pair()
        d.times = PerToken(sequence_s=0.1, context_s=0.01)
        forecast = Forecast(workers_of(p, d))
        for _ in range(50):
            forecast.prompts.saw(5)
        fill(d, 50)

        def taken(prompt_tokens: int, tpot_s: float) -> bool:
            asked = demand(prompt_tokens=prompt_tokens, output_tokens=2, tpot_s=tpot_s)
            way = [Candidate(decode=d, prefill=p)]
            return isinstance(Predictive().judge(asked, way, NO_CAPACITY, forecast, 0), Admitted)

        beside_s = 0.1 + 4 * 0.01
        assert taken(5, beside_s + 0.17)
        assert not taken(10, beside_s + 0.36)
        assert taken(10, beside_s + 0.37)
        assert taken(40, 4.0), "three quarters of the worker's pace are left"
        d.outlook.remove(key("0.0 0"))
        assert taken(40, 0.6), "nobody else is there"
        fill(d, 50)
        d.times = PerToken(sequence_s=0.1)
        assert taken(40, 0.21), "it takes no more of a step than any"

    def test_blocks_are_counted_when_it_gets_there(self) -> None:
        p, d = pair()
        d.outlook.add(key("a"), Expected(joins_s=0, ends_s=9, tokens=48))
        refusal = refusal_of(judge(Predictive(), p, d, asked=demand(prompt_tokens=12, tpot_s=9)))
        assert refusal.reason == "kv_exhausted"
        assert refusal.message == "it needs 4 KV blocks, and 3 will be free"
        assert refusal.retry_after_s == pytest.approx(9, abs=0.2)

    def test_blocks_are_left_to_the_worker_where_no_pace_was_asked_for(self) -> None:
        p, d = pair()
        d.outlook.add(key("a"), Expected(joins_s=0, ends_s=9, tokens=48))
        asked = demand(prompt_tokens=12)
        assert isinstance(judge(Predictive(), p, d, asked=asked), Admitted)
        d.outlook.remove(key("a"))
        d.outlook.add(key("a"), Expected(joins_s=0, ends_s=9, tokens=48, tpot_s=9))
        assert refusal_of(judge(Predictive(), p, d, asked=asked)).reason == "kv_exhausted"

    def test_a_worker_that_is_idle_is_asked_whatever_the_margins_are(self) -> None:
        """They were learnt under load: with nobody admitted they would stay for ever."""
        p, d = pair()
        forecast = Forecast(workers_of(p, d))
        for margin in (forecast.ttft, forecast.tpot):
            for _ in range(30):
                margin.observe(0.1, 0.5, 0.0, undisturbed=False)
        asked, way = demand(ttft_s=0.1, tpot_s=0.3), Candidate(decode=d, prefill=p)
        verdict = Predictive().judge(asked, [way], NO_CAPACITY, forecast, 0.0)
        assert isinstance(verdict, Admitted)
        fill(d, 50)
        refusal = refusal_of(Predictive().judge(asked, [way], NO_CAPACITY, forecast, 0.0))
        assert (refusal.reason, refusal.hopeless) == ("tpot_unreachable", False)
        assert refusal.retry_after_s == pytest.approx(50, abs=0.1)
        queue(p, 0.06)
        refusal = refusal_of(Predictive().judge(asked, [way], NO_CAPACITY, forecast, 0.0))
        assert (refusal.reason, refusal.hopeless) == ("ttft_unreachable", False)
        assert refusal.retry_after_s == pytest.approx(0.06)

    def test_the_time_of_the_best_way_is_told(self) -> None:
        p, d = pair()
        fill(d, 5, 6, 7)
        other = view("other", D)
        other.times = PerToken(sequence_s=0.1)
        fill(other, 50, 60, 70)
        asked = demand(tpot_s=0.31)
        again_s = refusal_of(judge(Predictive(), p, d, other, asked=asked)).retry_after_s
        assert again_s == pytest.approx(5, abs=0.1)

    def test_a_way_that_never_could_take_it_hides_none_that_could(self) -> None:
        """The best one is too slow for it even when idle, the other is busy."""
        p, slow = pair()
        slow.times = PerToken(sequence_s=0.9)
        busy = view("busy", D)
        busy.times = PerToken(sequence_s=0.1)
        fill(busy, 5, 6, 7)
        refusal = refusal_of(judge(Predictive(), p, slow, busy, asked=demand(tpot_s=0.15)))
        assert not refusal.hopeless
        assert refusal.retry_after_s == pytest.approx(7, abs=0.1)

    def test_the_time_to_come_back_is_worked_out_for_one_way_only(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And with few questions, however many sequences have to end."""
        p, d = pair(places=600)
        others = [view(f"other {i}", D, places=600) for i in range(7)]
        for worker in (d, *others):
            worker.times = PerToken(sequence_s=0.001)
            fill(worker, *range(1, 501))
        asked = demand(tpot_s=0.2)
        steps = 0

        def counted(*of: Demand | BatchThen | WorkerView) -> float:
            nonlocal steps
            steps += 1
            return step_with(*of)  # type: ignore[arg-type]

        monkeypatch.setattr(predictive, "step_with", counted)
        refusal = refusal_of(judge(Predictive(), p, d, *others, asked=asked))
        assert refusal.retry_after_s == pytest.approx(301, abs=2)
        assert steps <= 8 + 2 * 10

    @pytest.mark.parametrize(("deadline_s", "hopeless"), [(0.003, True), (1.2, False)])
    def test_a_deadline_has_a_reason_of_its_own(self, deadline_s: float, hopeless: bool) -> None:
        """A prompt of 30 ms and 7 steps of 100 ms, behind a second of others."""
        p, d = pair()
        queue(p, 1.0)
        asked = replace(demand(), objectives=Objectives(deadline_s=deadline_s))
        refusal = refusal_of(judge(Predictive(), p, d, asked=asked))
        assert (refusal.reason, refusal.hopeless) == ("deadline_unreachable", hopeless)
        assert (refusal.retry_after_s is None) == hopeless
        said = "3 ms" if hopeless else "1.20 s"
        assert refusal.message.endswith(f"its deadline is {said} after it was received")
        assert "730 ms without a queue" in refusal.message

    @pytest.mark.parametrize("most", [0, 1, 2, 7, 250])
    def test_the_fewest_are_found_as_by_looking_at_each(self, most: int) -> None:
        for first in range(most + 3):
            each = next((n for n in range(most + 1) if n >= first), None)
            assert fewest(lambda n, first=first: n >= first, most) == each


def test_a_workers_reason_is_explained() -> None:
    assert refused_by_worker("draining").message == "the worker is draining"
    assert refused_by_worker("kv_exhausted").reason == "kv_exhausted"
    assert refused_by_worker("new reason").message == "new reason"


def test_the_first_retry_time_is_a_guess_then_the_gap_bounded() -> None:
    clock = ReleaseClock()
    assert clock.retry_after_s() == 1.0
    clock.released(5)
    assert clock.retry_after_s() == 1.0
    clock.released(7)
    assert clock.retry_after_s() == 2.0
    clock.released(7 + 1e6)
    assert clock.retry_after_s() == 30.0
    quick = ReleaseClock()
    for _ in range(3):
        quick.released(1)
    assert quick.retry_after_s() == 0.05


class TestDoubt:
    """Workers that measured themselves too slow are tried now and then."""

    SLOW = demand(prompt_tokens=100, ttft_s=0.5)  # 1 s, they say

    def asked_at(self, now_s: float, p: WorkerView, d: WorkerView) -> Verdict:
        return judge(Predictive(), p, d, asked=self.SLOW, now_s=now_s)

    def test_idle_workers_are_tried_ever_more_seldom(self) -> None:
        p, d = pair()
        tried_s = []
        for now_s in range(100):
            verdict = self.asked_at(now_s, p, d)
            if isinstance(verdict, Admitted):
                tried_s.append(now_s)
                book_decode(self.SLOW, verdict, now_s)
                prefiller = verdict.candidate.prefiller
                book_prefill(self.SLOW, prefiller, verdict.prediction.prompt, now_s)
                for worker in verdict.candidate.workers:
                    worker.doubt.tried(now_s)
                    worker.give_back(self.SLOW.spec.key, now_s)
        assert tried_s == [5, 10, 20, 40, 80]

    def test_nobody_else_is_disturbed(self) -> None:
        p, d = pair()
        fill(d, 100.0)
        assert refusal_of(self.asked_at(6, p, d)).hopeless
        p, d = pair()
        d.said(Counters(running=1))  # another router's
        assert refusal_of(self.asked_at(6, p, d)).hopeless

    def test_the_impossible_is_refused(self) -> None:
        impossible = demand(prompt_tokens=100, ttft_s=0.9 / BELIEVED)
        assert refusal_of(judge(Predictive(), *pair(), asked=impossible, now_s=6)).hopeless
