"""When a decode worker computes a prompt itself, and what that does to those that decode there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.counters import Counters, LinkState
from kvrelay.messages import Generate, PoolUpdate, WorkerHello
from kvrelay.types import Incarnation, Role, Tier
from router.core.core import RouterCore
from router.core.events import Admit, Send, Submitted, WorkerJoined
from router.core.load.decode_outlook import DecodeOutlook, Expected, Pauses
from router.core.load.margins import Margin
from router.core.load.prefill_queue import Ahead
from router.core.policy.forecast import Forecast
from router.core.policy.kv_aware import MOST_CHUNKS, KvAware, LocalPrefill
from router.core.policy.placement import PlacementPolicy
from router.core.router_state import RouterState
from router.core.state.candidate import Candidate
from router.core.state.demand import Demand
from router.core.state.worker_view import WorkerView
from tests.unit.directory_kit import holding
from tests.unit.router_kit import (
    demand,
    hello,
    key,
    released,
    request,
    reserved,
    says,
    tokens,
    view,
    workers_of,
)
from tests.unit.test_placing import decodes, placed, timed, waits, ways, with_cached

P, D = Role.PREFILL, Role.DECODE
LOCAL, EXACT = LocalPrefill(), Margin(confidence=0.5)


def first(
    *workers: WorkerView, asked: Demand | None = None, policy: PlacementPolicy = LOCAL
) -> Candidate:
    return ways(policy, *workers, asked=asked)[0]


def pair() -> list[WorkerView]:
    """10 ms for a token of a prompt, 100 ms for each sequence of a step."""
    return timed(view("p", P), view("d", D))


# --- the choice ---------------------------------------------------------------------------------


def test_a_prompt_that_waits_elsewhere_is_computed_by_an_idle_decode_worker() -> None:
    p, d = pair()
    assert first(p, d).placement == placed("d", "p"), "nothing to gain"
    waits(p, seconds=0.1)
    assert first(p, d).placement == placed("d", None)
    assert first(p, d, policy=KvAware()).placement == placed("d", "p")


def test_what_it_has_cached_of_the_prompt_counts() -> None:
    p, d = pair()
    other = timed(view("d2", D))[0]
    asked = demand(prompt_tokens=40, directory=with_cached("d2", 9))
    p.counters = Counters(links=(slow_link("d"), slow_link("d2")))
    assert first(p, d, other, asked=asked).placement == placed("d2", None)
    for n in range(4):
        other.outlook.add(key(str(n)), expected())
    assert first(p, d, other, asked=asked).placement != placed("d2", None), "its places are taken"


def slow_link(peer: str) -> LinkState:
    return LinkState(peer=Incarnation(peer), transport="t", bytes_per_s=1e7, latency_s=0.1)


def test_a_slow_link_speaks_for_it() -> None:
    p, d = pair()
    p.counters = Counters(links=(slow_link("d"),))
    assert first(p, d).placement == placed("d", None)


def test_a_long_prompt_is_a_prefill_workers() -> None:
    p, d = pair()
    waits(p, seconds=100.0)
    most = MOST_CHUNKS * d.hello.prefill_chunk_tokens
    p, d = [WorkerView(hello=longer(w.hello), times=w.times, queue=w.queue) for w in (p, d)]
    assert first(p, d, asked=demand(prompt_tokens=most)).placement == placed("d", None)
    assert first(p, d, asked=demand(prompt_tokens=most + 1)).placement == placed("d", "p")


def longer(one: WorkerHello) -> WorkerHello:
    return hello(one.name, one.role, max_model_len=1000)


def test_without_prefill_workers_every_prompt_is_computed_by_decode_workers() -> None:
    d = timed(view("d", D))[0]
    d.outlook.add(key("strict"), expected(tpot_s=0.1))
    assert first(d).placement == placed("d", None)
    assert not ways(KvAware(), d)


def test_all_of_them_are_suggested_then() -> None:
    """Also those that no closer look is taken at, and those without a place."""
    many = timed(*(view(f"d{i}", D) for i in range(7)))
    decodes(many[0], 4, tokens=0)
    for asked in (demand(), demand(prompt_tokens=50, output_tokens=4)):
        found = ways(LOCAL, *many, asked=asked)
        assert {way.placement for way in found} == {placed(f"d{i}", None) for i in range(7)}
    assert {way.decode.incarnation for way in found[:4]} < {w.incarnation for w in many[1:]}


def test_whom_it_would_hurt_decides() -> None:
    """Three tokens take 30 ms. Over the 9 that the other one has left that is 3.3 ms each, and
    two sequences take 200 ms a step."""
    p, d = pair()
    waits(p, seconds=0.5)
    d.outlook.add(key("other"), expected(tpot_s=0.2034, gaps=9))
    assert first(p, d).placement == placed("d", None)
    d.outlook.remove(key("other"))
    d.outlook.add(key("other"), expected(tpot_s=0.2033, gaps=9))
    assert first(p, d).placement == placed("d", "p")


def expected(tpot_s: float | None = None, gaps: int = 9, joins_s: float = -1e-9) -> Expected:
    return Expected(joins_s=joins_s, ends_s=100, tokens=10, tpot_s=tpot_s, gaps=gaps)


def test_what_others_wait_counts_a_little() -> None:
    p, d = timed(view("p", P), view("d", D, places=40))
    asked = demand(prompt_tokens=30)
    waits(p, seconds=0.3)  # of 300 ms: as long as an idle decode worker would take
    assert first(p, d, asked=asked).placement == placed("d", None)
    decodes(d, 30, tokens=0)
    assert first(p, d, asked=asked).placement == placed("d", "p")


@pytest.mark.parametrize("policy", [KvAware(), LOCAL])
def test_a_request_that_goes_on_is_computed_where_most_of_it_lies(policy: PlacementPolicy) -> None:
    """Not if a prefill worker lacks as little, nor a rest that is too long."""
    p, d = pair()
    d2 = timed(view("d2", D))[0]
    directory = with_cached("d2", 9)
    asked = replace(demand(prompt_tokens=40, directory=directory), displaced=True)
    assert first(p, d, d2, asked=asked, policy=policy).placement == placed("d2", None)
    decodes(d2, 2)
    assert first(p, d, d2, asked=asked, policy=policy).placement == placed("d2", None)
    d2.outlook.add(key("strict"), expected(tpot_s=0.31, gaps=2))
    assert first(p, d, d2, asked=asked, policy=KvAware()).placement != placed("d2", None)
    d2.outlook.remove(key("strict"))
    names = asked.held.chains
    assert names, "kept for the next decision"
    directory.changed(p.incarnation, holding(next(iter(names.values())).full(36).hashes()))
    again = replace(demand(prompt_tokens=40, directory=directory), displaced=True)
    assert first(p, d, d2, asked=again, policy=KvAware()).placement != placed("d2", None)


def test_what_the_pool_has_is_not_what_a_prefill_worker_has() -> None:
    """It would be read from the pool and sent on, behind all prompts that wait there."""
    p, d = pair()
    directory = with_cached("d", 9)
    asked = replace(demand(prompt_tokens=40, directory=directory), displaced=True)
    assert first(p, d, asked=asked, policy=KvAware()).placement == placed("d", None)
    (names,) = asked.held.chains.values()
    pooled = holding(names.full(36).hashes(), tier=Tier.HOST)
    workers = (p.incarnation, d.incarnation)
    node = PoolUpdate(sequence=0, node=Incarnation("n"), workers=workers, blocks=(pooled,))
    directory.updated(node)
    again = replace(demand(prompt_tokens=40, directory=directory), displaced=True)
    assert again.held.tokens(p) == again.held.tokens(d) == 36
    assert first(p, d, asked=again, policy=KvAware()).placement == placed("d", None)


def test_a_long_rest_is_a_prefill_workers_also_if_it_goes_on() -> None:
    p, d = (WorkerView(hello=longer(w.hello), times=w.times) for w in pair())
    most = 4 + MOST_CHUNKS * d.hello.prefill_chunk_tokens
    for count, prefill in ((most, None), (most + 1, "p")):
        asked = demand(prompt_tokens=count, directory=with_cached("d", 1))
        asked = replace(asked, displaced=True)
        assert first(p, d, asked=asked, policy=KvAware()).placement == placed("d", prefill)


# --- the forecast -------------------------------------------------------------------------------


def test_a_prompt_shares_its_steps_with_the_batch() -> None:
    """Chunks of eight; a step runs already when it comes."""
    p, d = pair()
    decodes(d, 2, tokens=0)
    forecast = Forecast(workers_of(p, d))
    local = forecast.prompt(demand(prompt_tokens=20), Candidate(decode=d, prefill=None), 0.0)
    assert local.queue_s == pytest.approx(0.2)
    assert local.prefill_s == pytest.approx(0.2 + 3 * 0.2)
    assert local.pause_s == pytest.approx(0.2)


def test_who_joins_while_it_computes_waits_too() -> None:
    p, d = pair()
    forecast, way = Forecast(workers_of(p, d)), Candidate(decode=d, prefill=p)
    calm = forecast.predict(demand(), way, 0.0)
    d.queue.add(key("long"), Ahead(seconds=5.0, tokens=500), 0.0)
    busy = forecast.predict(demand(), way, 0.0)
    waits_s = 5.0 - calm.decode.joins_in_s
    assert busy.tpot_s == pytest.approx(calm.tpot_s + waits_s / 7)


def test_pauses_add_up_over_a_life() -> None:
    """Each of them alone would be borne."""
    outlook = DecodeOutlook()
    outlook.add(key("a"), expected(tpot_s=0.2, gaps=10, joins_s=0))
    assert outlook.bears(0.9, 0.0, 0.1, EXACT, 1.0)
    assert not outlook.bears(1.1, 0.0, 0.1, EXACT, 1.0)
    assert not outlook.bears(0.6, 0.6, 0.1, EXACT, 1.0), "another one is booked before"
    outlook.pauses.add(0.6, 1.0)
    assert not outlook.bears(0.6, 0.0, 0.1, EXACT, 1.0)
    outlook.add(key("b"), Expected(joins_s=2, ends_s=100, tokens=1, tpot_s=0.2, gaps=10))
    outlook.remove(key("a"))
    assert outlook.bears(0.6, 0.0, 0.1, EXACT, 2.0), "b came after the first one"


def test_fewer_tokens_left_bear_less() -> None:
    outlook = DecodeOutlook()
    outlook.add(key("a"), Expected(joins_s=0, ends_s=10, tokens=1, tpot_s=0.2, gaps=100))
    assert outlook.bears(1.9, 0.0, 0.18, EXACT, 0.0)
    assert not outlook.bears(1.9, 0.0, 0.18, EXACT, 5.0)
    assert outlook.bears(0.49, 0.0, 0.18, EXACT, 30.0), "it outlives its time"
    assert not outlook.bears(0.51, 0.0, 0.18, EXACT, 30.0)


def test_pauses_since_then() -> None:
    pauses = Pauses()
    assert pauses.since(0) == 0
    for at_s, pause_s in ((1, 1), (2, 10), (3, 100)):
        pauses.add(pause_s, at_s)
    assert [pauses.since(at_s) for at_s in (0, 1.5, 3, 4)] == [111, 110, 100, 0]


# --- the core -----------------------------------------------------------------------------------


def test_a_local_prefill_from_submission_to_release() -> None:
    core = RouterCore(RouterState(placing=LOCAL))
    for name, role in (("p", P), ("d", D)):
        core.handle(WorkerJoined(hello=hello(name, role)), 0)
    core.state.workers[Incarnation("p")].queue.add(key("long"), Ahead(seconds=9, tokens=1), 1)
    (sent,) = core.handle(Submitted(request=request()), 1)
    assert isinstance(sent, Send) and isinstance(sent.message, Generate)
    decode = core.state.workers[Incarnation("d")]
    assert (decode.queue.tokens, decode.outlook.sequences) == (3, 1)
    assert says(core, "d", reserved()) == [Admit(request_id="r")]
    assert core.state.local_prefills == 1
    says(core, "d", tokens(0, 10))
    assert len(decode.queue) == 0
    one = core.state.requests["r"]
    assert "local_prefill" in one.ledger.phases() and "prefill" not in one.ledger.phases()
    says(core, "d", released())
    assert decode.outlook.sequences == 0
