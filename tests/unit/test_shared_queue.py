"""Prompts that wait at the router, and the prefill workers that they go to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.messages import Abort, Generate, Lifetime, Prefill, Reserve
from kvrelay.qos import QosTier, QosTiers
from kvrelay.types import Incarnation, Objectives, Role
from router.core.core import RouterCore
from router.core.events import Aborted, Admit, Command, Send, Submitted, WorkerJoined, WorkerLost
from router.core.router_state import RouterState
from router.core.shared_queue import (
    LOOKED_AT,
    Queued,
    SharedQueue,
    SharedQueueDispatch,
    level,
    open_shared_queue,
)
from router.core.state.generation import GenerationRequest
from router.core.state.quarantine import Pair
from router.core.workers import Workers
from tests.unit.router_kit import (
    failed,
    hello,
    key,
    lifetime,
    refused,
    released,
    request,
    reserved,
    says,
    spec,
    tokens,
)

P, D = Role.PREFILL, Role.DECODE
CHUNK = 8
LONG = tuple(range(20))


def shared(*prefills: str, tiers: QosTiers | None = None) -> RouterCore:
    workers, tiers = Workers(), tiers or QosTiers()
    dispatch = open_shared_queue(workers, tiers)
    core = RouterCore(RouterState(dispatch=dispatch, tiers=tiers, workers=workers))
    for name in prefills:
        core.handle(WorkerJoined(hello=hello(name, P)), 0)
    core.handle(WorkerJoined(hello=hello("d", D, places=40)), 0)
    return core


def asked(name: str, **changes: object) -> GenerationRequest:
    return replace(request(name), prompt_ids=LONG, **changes)  # type: ignore[arg-type]


def take(core: RouterCore, *requests: GenerationRequest) -> list[Command]:
    """Submitted and reserved, one after another: attempts count from 0."""
    commands = []
    for one in requests:
        core.handle(Submitted(request=one), 1)
        attempt = core.state.requests[one.request_id].attempt
        commands += says(core, "d", reserved(one.request_id, attempt))
    return commands


def prefills(commands: list[Command]) -> list[tuple[str, str]]:
    """(worker, request)"""
    sends = [one for one in commands if isinstance(one, Send)]
    return [
        (one.worker, one.message.spec.key.request_id)
        for one in sends
        if isinstance(one.message, Prefill)
    ]


def ran(name: str, attempt: int, count: int) -> Lifetime:
    return Lifetime(key=key(name, attempt), at_s=2, name="prefill_chunk", tokens=count)


def ended(name: str, attempt: int) -> tuple[object, ...]:
    return (tokens(0, 10, name=name, attempt=attempt), released(name, attempt))


def test_the_place_comes_first_and_then_a_free_worker() -> None:
    core = shared("p")
    (ask,) = core.handle(Submitted(request=request()), 1)
    assert ask == Send(worker=Incarnation("d"), message=Reserve(spec=spec(), source=None))
    admit, send = says(core, "d", reserved())
    assert admit == Admit(request_id="r")
    assert isinstance(send, Send) and isinstance(send.message, Prefill)
    assert "router_queue" in core.state.requests["r"].ledger.phases()
    core.validate()


def test_a_worker_gets_the_next_when_a_chunk_is_left() -> None:
    core = shared("p")
    given = take(core, asked("a"), asked("b"), asked("c"))
    assert prefills(given) == [("p", "a")]
    assert prefills(says(core, "p", lifetime("prefill_started", "a", 0))) == []
    assert prefills(says(core, "p", ran("a", 0, CHUNK))) == []
    assert prefills(says(core, "p", ran("a", 0, CHUNK))) == [("p", "b")]
    assert prefills(says(core, "p", *ended("a", 0))) == []  # type: ignore[arg-type]
    assert core.state.dispatch.waiting == 1
    core.validate()


def test_what_a_worker_finds_cached_is_not_left_to_compute() -> None:
    core = shared("p")
    take(core, asked("a"), asked("b"))
    started = Lifetime(key=key("a"), at_s=2, name="prefill_started", tokens=16)
    assert prefills(says(core, "p", started)) == [("p", "b")]


def test_a_worker_that_does_not_go_on_gets_no_more() -> None:
    core = shared("p", "slow")
    given = take(core, *(asked(str(n)) for n in range(6)))
    assert {worker for worker, _ in prefills(given)} == {"p", "slow"}
    (mine,) = (name for worker, name in prefills(given) if worker == "p")
    found = []
    for _ in range(4):
        attempt = core.state.requests[mine].attempt
        commands = says(core, "p", *ended(mine, attempt))  # type: ignore[arg-type]
        found += prefills(commands)
        ((_, mine),) = prefills(commands)
    assert [worker for worker, _ in found] == ["p"] * 4


def test_a_dead_worker_holds_only_what_it_had() -> None:
    core = shared("p", "doomed")
    given = take(core, *(asked(str(n)) for n in range(4)))
    (lost,) = (name for worker, name in prefills(given) if worker == "doomed")
    attempts = {name: one.attempt for name, one in core.state.requests.items()}
    commands = core.handle(WorkerLost(incarnation=Incarnation("doomed")), 3)
    changed = {name for name, one in core.state.requests.items() if one.attempt != attempts[name]}
    assert changed == {lost}
    assert [c.message.key for c in commands if isinstance(c, Send) if isinstance(c.message, Abort)]
    core.validate()


def test_without_any_prefill_worker_decode_workers_compute_them() -> None:
    core = shared("p")
    take(core, asked("a"), asked("b"))
    commands = core.handle(WorkerLost(incarnation=Incarnation("p")), 3)
    sent = [one.message for one in commands if isinstance(one, Send)]
    assert {one.spec.key.request_id for one in sent if isinstance(one, Generate)} == {"a", "b"}
    assert not core.state.dispatch.waiting
    core.validate()


def test_a_worker_that_comes_gets_what_waits() -> None:
    core = shared("p")
    take(core, asked("a"), asked("b"))
    assert prefills(core.handle(WorkerJoined(hello=hello("new", P)), 4)) == [("new", "b")]


def test_who_is_given_up_waits_no_more() -> None:
    core = shared("p")
    take(core, asked("a"), asked("b"), asked("c"))
    (abort,) = core.handle(Aborted(request_id="b"), 3)
    assert isinstance(abort, Send) and abort.worker == "d"
    assert prefills(says(core, "p", *ended("a", 0))) == [("p", "c")]  # type: ignore[arg-type]
    core.handle(Submitted(request=asked("e")), 3)
    attempt = core.state.requests["e"].attempt
    says(core, "d", refused("slots_exhausted", "e", attempt))
    assert isinstance(core.state.dispatch, SharedQueueDispatch)
    assert key("e", attempt) not in core.state.dispatch.queue
    core.validate()


def test_urgent_ones_first() -> None:
    core = shared("p")
    soon = Objectives(ttft_s=30.0)
    take(core, asked("a"), asked("b"), asked("urgent", objectives=soon))
    assert prefills(says(core, "p", *ended("a", 0))) == [("p", "urgent")]  # type: ignore[arg-type]


def test_higher_tiers_first() -> None:
    tiers = QosTiers(
        tiers=(QosTier(name="low", priority=5), QosTier(name="high", priority=1)), default="low"
    )
    core = shared("p", tiers=tiers)
    take(core, asked("a"), asked("b"), asked("c", qos_tier="high"))
    assert prefills(says(core, "p", *ended("a", 0))) == [("p", "c")]  # type: ignore[arg-type]


def test_a_suspected_pair_waits_for_another_worker() -> None:
    core = shared("p", "q")
    given = dict(prefills(take(core, asked("a"))))
    ((worker, _),) = given.items()
    other = "q" if worker == "p" else "p"
    says(core, worker, failed("transfer_failed", "a", 0))
    attempt = core.state.requests["a"].attempt
    assert prefills(says(core, "d", reserved("a", attempt))) == [(other, "a")]


def test_those_that_no_free_worker_may_have_hold_up_nobody() -> None:
    """More of them than are looked at."""
    core = shared("p", "q")
    take(core, asked("x"), asked("y"))
    (busy,) = [worker for worker, name in running(core) if name == "y"]
    heads = [f"head{i}" for i in range(LOOKED_AT + 2)]
    assert not prefills(take(core, *map(asked, heads), asked("behind")))
    for name in heads:
        core.state.requests[name].avoided.add(Pair(Incarnation(busy), Incarnation("d")))
    assert prefills(says(core, busy, *ended("y", 1))) == [(busy, "behind")]  # type: ignore[arg-type]
    assert not prefills(says(core, busy))


def running(core: RouterCore) -> list[tuple[str, str]]:
    """(prefill worker, request)"""
    return [
        (leg, one.request_id) for one in core.state.requests.values() for leg in one.workers[1:]
    ]


def test_a_trial_of_a_worker_is_counted() -> None:
    """20 tokens take 58 ms, the worker says."""
    core = shared("p")
    hasty = Objectives(ttft_s=0.03)

    def ask(name: str, now_s: float) -> bool:
        core.handle(Submitted(request=asked(name, objectives=hasty)), now_s)
        if name not in core.state.requests:
            return False
        attempt = core.state.requests[name].attempt
        says(core, "d", reserved(name, attempt), now_s=now_s)
        core.handle(Aborted(request_id=name), now_s)
        for worker in ("p", "d"):
            says(core, worker, released(name, attempt), now_s=now_s)
        assert all(view.is_idle for view in core.state.workers.values())
        return True

    tried_s = [now_s for now_s in range(1, 30) if ask(str(now_s), now_s)]
    assert tried_s == [5, 10, 20]


def test_admission_knows_of_the_queue() -> None:
    """20 tokens: 3 steps of at least 10 ms, 20 ms for tokens; ten of them before it."""
    core = shared("p", "q")
    take(core, *(asked(str(n)) for n in range(12)))
    core.handle(Submitted(request=asked("late", objectives=Objectives(ttft_s=0.25))), 1)
    assert "late" not in core.state.requests
    core.handle(Submitted(request=asked("patient", objectives=Objectives(ttft_s=5.0))), 1)
    predicted = core.state.requests["patient"].predicted
    assert predicted is not None and 0.25 < predicted.prompt.queue_s < 0.45


# --- how long ------------------------------------------------------------------------------------


def test_levels() -> None:
    assert level(0, [3, 1, 2]) == 1
    assert level(1, [3, 1, 2]) == 2
    assert level(2, [3, 1, 2]) == 2.5
    assert level(6, [3, 1, 2]) == 4
    assert level(6, []) == 0


@given(st.floats(0, 100), st.lists(st.floats(0, 50), min_size=1, max_size=9))
def test_all_work_is_done_by_then(work_s: float, busy_s: list[float]) -> None:
    then_s = level(work_s, busy_s)
    assert sum(max(0.0, then_s - one) for one in busy_s) == pytest.approx(work_s, abs=1e-6)


def test_only_what_goes_before_counts() -> None:
    queue = SharedQueue()
    for name, priority in (("a", 1), ("b", 5)):
        queue.expect(Queued(spec=spec(name), seconds=2.0, priority=priority))
    assert [queue.starts_in_s(p, [1.0], 0) for p in (0, 1, 5)] == [1, 3, 5]
    queue.remove(key("a"))
    queue.remove(key("a"))
    assert queue.starts_in_s(5, [1.0], 0) == 3
