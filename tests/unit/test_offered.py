"""What clients ask for is offered work: each request once, and none that nobody could serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest

from kvpool.core.layout.block_names import BlockNames
from kvrelay.types import NO_OBJECTIVES, Incarnation, Objectives, Role, Sampling
from router.core.core import RouterCore
from router.core.events import Refuse, Submitted, WorkerJoined, WorkerLost
from router.core.load.needs import Needs, model_of
from router.core.load.offered import OfferedWork
from router.core.policy.choice import Policies
from router.core.promises import returning
from router.core.promises.returning import SAME_S, Returning
from router.core.start import Beginning, begin
from router.core.state.directory import Directory
from router.core.state.generation import GenerationRequest
from router.core.state.offered import OfferedLoad, most_cached
from tests.unit.directory_kit import holding
from tests.unit.router_kit import (
    PROMPT,
    STEP_TIMES,
    core_with,
    demand,
    hello,
    released,
    request,
    reserved,
    says,
    split,
    submit,
    tokens,
    view,
)

# --- each request once ----------------------------------------------------------------------------


def asks(core: RouterCore, asked: GenerationRequest, now_s: float) -> Refuse | None:
    told = core.handle(Submitted(request=asked), now_s)
    core.state.validate()
    return next((one for one in told if isinstance(one, Refuse)), None)


def offered(core: RouterCore) -> float:
    return core.state.offered.total.requests


def full() -> RouterCore:
    """Its only slot is taken by another request."""
    core = split(places=1)
    asks(core, replace(request("filler"), prompt_ids=(9, 9)), 1)
    says(core, "d", reserved("filler"))
    return core


def test_admitted_and_refused_requests_are_offered() -> None:
    core = split(places=1)
    submit(core, "one")
    first = core.state.offered.total
    assert (first.requests, first.prompt_tokens) == (1, len(PROMPT))
    assert first.output_tokens == 8 and first.context_tokens == 8 * (len(PROMPT) + 4)
    assert asks(core, request("two"), 1)
    assert offered(core) == 2


@pytest.mark.parametrize("after_s", [0.0, 0.01, 30.0, SAME_S - 1])
@pytest.mark.parametrize("brings_it", [True, False])
def test_a_refused_client_is_the_same_work_whenever_it_comes_back(
    after_s: float, brings_it: bool
) -> None:
    """Early, in time, and after its promise has expired; with what it was told, and without."""
    core, now_s, promise = full(), 2.0, None
    for number in range(4):
        told = asks(core, replace(request(f"try {number}"), promise=promise), now_s)
        assert told is not None and told.refusal.promise is not None
        assert offered(core) == 2
        promise = replace(told.refusal.promise, due_in_s=told.refusal.promise.due_in_s - after_s)
        promise, now_s = promise if brings_it else None, now_s + after_s


def test_a_promise_is_known_to_a_router_that_did_not_make_it_however_late() -> None:
    core = full()
    told = asks(core, request("elsewhere"), 2)
    assert told is not None and told.refusal.promise is not None
    for due_in_s, new in ((5.0, 0), (-20.0, 0), (-SAME_S - 1, 1)):
        other, promise = full(), replace(told.refusal.promise, due_in_s=due_in_s)
        asks(other, replace(request("two"), promise=promise), 2)
        assert offered(other) == 1 + new


def test_who_was_refused_without_a_promise_is_counted_once_too() -> None:
    core = RouterCore()
    for number in range(5):
        told = asks(core, request(f"try {number}"), 1.0 + number)
        assert told is not None and told.refusal.promise is None
    assert offered(core) == 1
    asks(core, request("much later"), 6 + SAME_S)
    assert offered(core) == 2


def test_another_tenant_or_length_is_another_client() -> None:
    core = RouterCore()
    asks(core, request("one"), 1)
    asks(core, replace(request("two"), tenant="other"), 1)
    asks(core, request("three", max_tokens=9), 1)
    asks(core, request("four", n=2), 1)
    assert offered(core) == 4


def served(core: RouterCore, name: str, now_s: float) -> None:
    assert asks(core, request(name), now_s) is None
    attempt = core.state.requests[name].attempt
    says(core, "d", reserved(name, attempt), now_s=now_s)


def test_clients_that_send_the_same_prompt_count_each_once_one_of_them_is_served() -> None:
    """As in a load test: else what is offered would be no more than what is served."""
    core = split(places=2)
    for name in ("one", "two"):
        served(core, name, 1)
    assert asks(core, request("three"), 2)
    before = offered(core)
    assert before == 3
    _leaves(core, "one", 3)
    served(core, "four", 3)  # it may be the third one, which comes back
    assert offered(core) == before
    for number in range(10):
        asks(core, request(f"more {number}"), 4.0 + number)
    assert offered(core) == before + 10


def test_a_client_that_was_served_in_the_end_offers_new_work_with_the_same_prompt() -> None:
    core = split(places=1)
    served(core, "other", 1)
    assert asks(core, request("one"), 2)
    _leaves(core, "other", 3)
    served(core, "one again", 4)
    assert offered(core) == 2
    _leaves(core, "one again", 5)
    served(core, "anew", 6)
    assert offered(core) == 3
    _leaves(core, "anew", 7)
    served(core, "other again", 8)
    assert asks(core, request("refused anew"), 9), "one is served meanwhile"
    assert offered(core) == 5


def test_a_client_that_was_served_and_is_refused_anew_is_known_when_it_comes_back() -> None:
    core = full()
    assert asks(core, request("one"), 2)
    _leaves(core, "filler", 3)
    served(core, "one again", 4)
    _leaves(core, "one again", 5)
    asks(core, replace(request("other"), prompt_ids=(9, 9)), 6)
    before = offered(core)
    for number in range(3):
        assert asks(core, request(f"anew {number}"), 7.0 + number / 100)
    assert offered(core) == before + 1


def _leaves(core: RouterCore, name: str, now_s: float) -> None:
    attempt = core.state.requests[name].attempt
    says(core, "p", released(name, attempt), now_s=now_s)
    done = tokens(0, *range(8), name=name, attempt=attempt, reason="length")
    says(core, "d", done, released(name, attempt), now_s=now_s)
    assert name not in core.state.requests


def test_refusals_are_forgotten_in_time_and_kept_no_more_than_so_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(returning, "MOST_REFUSED", 3)
    known = Returning()
    for digest in (1, 2, 3, 1, 4):
        known.refused(digest, 10)
        known.validate()
    assert [known.is_back(digest, 10, ()) for digest in (1, 2, 3, 4)] == [True, False, True, True]
    known.refused(5, 10 + SAME_S + 1)
    assert len(known) == 1


def test_without_any_worker_work_is_offered_too() -> None:
    core = RouterCore()
    submit(core)
    assert offered(core) == 1


def test_objectives_are_summed_over_those_that_have_some() -> None:
    core = split(places=4)
    submit(core, "plain")
    asks(core, replace(request("asked"), objectives=Objectives(ttft_s=0.5, tpot_s=0.1)), 1)
    found = core.state.offered.total
    assert (found.ttft_s, found.with_ttft, found.tpot_s, found.with_tpot) == (0.5, 1, 0.1, 1)


def test_what_is_predicted_is_a_share_of_what_is_asked_for_admitted_or_refused() -> None:
    core = split(places=4)
    submit(core, "plain")
    assert core.state.offered.shares.told() == {}
    for ttft_s in (100.0, 1e-6):
        asked = replace(request(f"in {ttft_s} s"), objectives=Objectives(ttft_s=ttft_s))
        assert (asks(core, asked, 1) is not None) == (ttft_s < 1)
    shares = core.state.offered.shares.told()
    assert [*shares] == ["ttft"]
    assert (shares["ttft"].up_to()[0.1], shares["ttft"].counts[inf]) == (1, 1)


def test_a_request_that_is_tried_again_is_the_same_work() -> None:
    core = core_with(places=4, p=Role.PREFILL, d=Role.DECODE)
    submit(core)
    core.handle(WorkerJoined(hello=hello("d2", Role.DECODE)), 2)
    core.handle(WorkerLost(incarnation=Incarnation("d")), 3)
    assert offered(core) == 1


# --- what some worker has cached ------------------------------------------------------------------


def test_a_part_of_a_prompt_is_work_and_no_request() -> None:
    core = split()
    asked = replace(request(), objectives=Objectives(tpot_s=1.0))
    asks(core, replace(asked, request_id="part", is_ahead=True, objectives=NO_OBJECTIVES), 1)
    work = core.state.offered.total
    assert (work.requests, work.prompt_tokens > 0) == (0, True)
    asks(core, asked, 2)
    work = core.state.offered.total
    assert (work.requests, work.with_tpot) == (1, 1)


def test_of_a_prompt_only_what_no_worker_has_is_work() -> None:
    load = OfferedLoad()
    load.add(demand(prompt_tokens=40, output_tokens=8), 30, {})
    assert load.total == OfferedWork(
        requests=1,
        prompt_tokens=10,
        prompt_squares=100,
        prompt_pairs=10 * 30 + 55,
        output_tokens=8,
        context_tokens=8 * (40 + 4),
    )
    load.add(demand(prompt_tokens=40), 40, {})
    assert load.total.prompt_tokens == 11, "the last token is computed again"


def with_cached(**blocks: int) -> Directory:
    """# worker |-> blocks of the prompt 0, 1, 2 ... of four tokens"""
    told, directory = hello("p", Role.PREFILL), Directory()
    names = BlockNames(
        fingerprint=told.fingerprint,
        physical_format=told.physical_format,
        rope_border_tokens=told.rope_border_tokens,
    )
    for worker, count in blocks.items():
        chain = names.chain("", 100, 4)
        chain.extend(range(100), 4 * count)
        directory.changed(Incarnation(worker), holding(chain.full(4 * count).hashes()))
    return directory


def test_the_most_that_any_worker_has_counts_as_cached() -> None:
    asked = demand(prompt_tokens=40, directory=with_cached(p=2, q=5))
    assert most_cached(asked, view("p", Role.PREFILL)) == 20
    assert most_cached(asked, None) == 0
    core = core_with(p=Role.PREFILL, d=Role.DECODE)
    core.state.directory = with_cached(d=5)
    sampling = Sampling(max_tokens=8, seed=1)
    long = GenerationRequest(request_id="r", prompt_ids=tuple(range(40)), sampling=sampling)
    asks(core, long, 1)
    found = core.state.offered.total
    assert (found.prompt_tokens, found.prompt_pairs) == (20, 20 * 20 + 210)


# --- what nobody could serve in time --------------------------------------------------------------

ALONE_S = 0.01 + 0.002 + 3 * 0.001 + 6e-6
"""The prompt's step, on a worker of the kit."""
STEP_S = 0.01 + 7 * 1e-5
"""A decode step with it alone."""
IMPOSSIBLE = [
    Objectives(ttft_s=0.9 * ALONE_S),
    Objectives(tpot_s=0.9 * STEP_S),
    Objectives(deadline_s=0.9 * (ALONE_S + 7 * STEP_S)),
]
POSSIBLE = [
    Objectives(ttft_s=1.1 * ALONE_S),
    Objectives(tpot_s=1.1 * STEP_S),
    Objectives(deadline_s=1.1 * (ALONE_S + 7 * STEP_S)),
    NO_OBJECTIVES,
]


def after(core: RouterCore, objectives: Objectives, count: int = 1) -> tuple[float, int]:
    """Requests that were offered, and those that are hopeless."""
    before = offered(core)
    for number in range(count):
        prompt = (number, number, number)
        asked = replace(request(f"{number}"), prompt_ids=prompt, objectives=objectives)
        asks(core, asked, 2.0 + number / 100)
    return offered(core) - before, core.state.offered.hopeless["default"]


@pytest.mark.parametrize("cluster", [split, full])
@pytest.mark.parametrize("objectives", IMPOSSIBLE)
def test_what_no_idle_worker_could_serve_adds_nobody_whatever_the_load(
    cluster: Callable[[], RouterCore], objectives: Objectives
) -> None:
    core = cluster()
    begun = core.state.offered.total
    assert after(core, objectives, 100) == (0, 100)
    model = model_of(hello("p", Role.PREFILL))
    needs = Needs.of((core.state.offered.total - begun).scaled(1.0), model)
    assert (needs.prefill_workers(20), needs.decode_workers(20)) == (0, 0)


@pytest.mark.parametrize("cluster", [split, full, RouterCore])
@pytest.mark.parametrize("objectives", POSSIBLE)
def test_what_an_idle_worker_could_serve_is_work_whatever_the_load(
    cluster: Callable[[], RouterCore], objectives: Objectives
) -> None:
    assert after(cluster(), objectives, 3) == (3, 0)


@pytest.mark.parametrize("objectives", IMPOSSIBLE)
def test_one_worker_that_could_is_enough_and_without_workers_nobody_can_tell(
    objectives: Objectives,
) -> None:
    core = full()
    times = replace(STEP_TIMES, prefill_overhead_s=0.0, decode_knots=((1, 0.001), (4, 0.002)))
    for name, role in (("p2", Role.PREFILL), ("d2", Role.DECODE)):
        fast = replace(hello(name, role, places=1), step_times=times)
        core.handle(WorkerJoined(hello=fast), 1)
    assert after(core, objectives) == (1, 0)
    assert after(RouterCore(), objectives) == (1, 0)


def test_a_cached_prompt_takes_less_so_more_can_be_asked_for() -> None:
    asked = GenerationRequest(
        request_id="r",
        prompt_ids=tuple(range(40)),
        sampling=Sampling(max_tokens=8, seed=1),
        objectives=Objectives(ttft_s=0.07),
    )
    for cached, found in ((0, (0, 1)), (5, (1, 0))):
        core = full()
        core.state.directory = with_cached(p=cached)
        assert asks(core, asked, 2)
        assert (offered(core) - 1, core.state.offered.hopeless["default"]) == found


def test_a_router_that_takes_everything_has_the_work_whatever_was_asked_for() -> None:
    core = begin(Beginning(policies=Policies(admission="none")))
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        core.handle(WorkerJoined(hello=hello(name, role)), 0)
    assert after(core, IMPOSSIBLE[0], 3) == (3, 0)


def test_hopeless_requests_count_once_too() -> None:
    core = split()
    for number in range(5):
        asked = replace(request(f"try {number}"), objectives=IMPOSSIBLE[0])
        assert asks(core, asked, 1.0 + number / 10)
    assert (offered(core), core.state.offered.hopeless["default"]) == (0, 1)
