"""What is a tier's own at a decode worker, as routers see it: taken whoever has borrowed it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.counters import Counters, TierLoad
from kvrelay.qos import QosTier, QosTiers
from kvrelay.types import Role
from router.core.load.decode_outlook import Expected
from router.core.policy.admission import Admitted, Verdict, is_own
from router.core.policy.forecast import Forecast
from router.core.policy.kv_aware import KvAware
from router.core.policy.predictive import Predictive
from router.core.promises.refusal import NO_CAPACITY, Refusal
from router.core.state.candidate import Candidate
from router.core.state.demand import Demand
from router.core.state.worker_view import WorkerView
from router.core.workers import Workers
from tests.unit.router_kit import PerToken, demand, key, view, workers_of

PREMIUM = QosTier(name="premium", share=0.5)
FREE = QosTier(name="free", priority=1)
TIERS = QosTiers(tiers=(PREMIUM, FREE), default="free")


def pair() -> tuple[WorkerView, WorkerView]:
    """Of 4 places 2 are premium's; 100 ms for each sequence of a batch."""
    p, d = view("p", Role.PREFILL), view("d", Role.DECODE)
    d.times = PerToken(sequence_s=0.1)
    return p, d


def fill(d: WorkerView, tier: str, count: int, *, tokens: int = 4) -> None:
    for i in range(count):
        expected = Expected(joins_s=0, ends_s=50, tokens=tokens, tier=tier, tpot_s=0.5)
        d.outlook.add(key(f"{tier}{i}"), expected)


def of(tier: QosTier, *, n: int = 1, tpot_s: float | None = None, tokens: int = 3) -> Demand:
    asked = demand(n=n, tpot_s=tpot_s, tier=tier, prompt_tokens=tokens)
    return replace(asked, tiers=TIERS)


def judged(p: WorkerView, d: WorkerView, asked: Demand) -> Verdict:
    way = Candidate(decode=d, prefill=p)
    return Predictive().judge(asked, [way], NO_CAPACITY, Forecast(workers_of(p, d)), 0.0)


def reason(verdict: Verdict) -> str:
    assert isinstance(verdict, Refusal), verdict
    return verdict.reason


def test_its_own_place_is_there_though_all_are_taken() -> None:
    p, d = pair()
    fill(d, "free", 4)
    assert isinstance(judged(p, d, of(PREMIUM)), Admitted)
    assert reason(judged(p, d, of(FREE))) == "slots_exhausted"
    assert reason(judged(p, d, of(PREMIUM, n=3))) == "slots_exhausted"


def test_beyond_its_share_it_is_one_of_many() -> None:
    p, d = pair()
    fill(d, "premium", 1)
    fill(d, "free", 3)
    assert isinstance(judged(p, d, of(PREMIUM)), Admitted)
    assert not is_own(of(PREMIUM, n=2), d)
    fill_one_more = Expected(joins_s=0, ends_s=50, tokens=4, tier="premium")
    d.outlook.add(key("more"), fill_one_more)
    assert reason(judged(p, d, of(PREMIUM))) == "slots_exhausted"
    d.outlook.remove(key("more"))
    assert isinstance(judged(p, d, of(PREMIUM)), Admitted)


def test_what_another_router_has_sent_there_is_the_tier_s_too() -> None:
    p, d = pair()
    fill(d, "free", 4)
    d.counters = Counters(tiers=(TierLoad(tier="premium", running=2, waiting=0),))
    assert reason(judged(p, d, of(PREMIUM))) == "slots_exhausted"
    d.counters = Counters(tiers=(TierLoad(tier="free", running=4, waiting=0),))
    assert isinstance(judged(p, d, of(PREMIUM)), Admitted)


def test_those_on_lent_places_do_not_count_against_its_pace() -> None:
    p, d = pair()
    fill(d, "free", 3)
    assert isinstance(judged(p, d, of(PREMIUM, tpot_s=0.25)), Admitted)
    assert reason(judged(p, d, of(FREE, tpot_s=0.25))) == "tpot_unreachable"


@pytest.mark.parametrize(("there", "hopeless"), [(0, True), (1, False)])
def test_those_on_their_own_places_do(there: int, hopeless: bool) -> None:
    p, d = pair()
    fill(d, "premium", there)
    refusal = judged(p, d, of(PREMIUM, tpot_s=0.1 * there + 0.05))
    assert reason(refusal) == "tpot_unreachable"
    assert isinstance(refusal, Refusal) and refusal.hopeless == hopeless


def test_it_gets_the_blocks_of_those_on_lent_places() -> None:
    p, d = pair()
    fill(d, "free", 1, tokens=48)
    assert isinstance(judged(p, d, of(PREMIUM, tokens=12, tpot_s=9)), Admitted)
    assert reason(judged(p, d, of(FREE, tokens=12, tpot_s=9))) == "kv_exhausted"


def test_a_worker_where_it_has_a_place_of_its_own_is_not_passed_over() -> None:
    """The other one has a free place, and would be slower."""
    p, d = pair()
    fill(d, "free", 4)
    slow = view("slow", Role.DECODE)
    slow.times = PerToken(sequence_s=9.0)
    workers = Workers({one.incarnation: one for one in (p, d, slow)})

    def best(asked: Demand) -> WorkerView:
        choice = workers.choice(asked, (), lambda pair: (0, 0.0), Forecast(workers))
        return next(iter(KvAware().candidates(asked, choice, 0.0))).decode

    assert best(of(PREMIUM)) is d
    assert best(of(FREE)) is slow
