"""A worker takes another role: routers send it the other kind of work, and lose none of the old."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.counters import Counters
from kvrelay.messages import Prefill, Preload, Reserve
from kvrelay.qos import ONE_TIER
from kvrelay.types import FinishReason, Incarnation, Role
from router.core.core import RouterCore
from router.core.events import Command, Send, WorkerJoined, WorkerSaid
from router.core.router_state import RouterState
from router.core.shared_queue import open_shared_queue
from router.core.workers import Workers
from tests.unit.router_kit import (
    core_with,
    hello,
    lifetime,
    released,
    reserved,
    says,
    spec,
    submit,
    tokens,
)
from tests.unit.test_router_core import assert_no_books, delivered

A, B, C = (Incarnation(name) for name in "abc")


def takes(
    core: RouterCore, worker: str, role: Role, epoch: int = 1, now_s: float = 2
) -> list[Command]:
    counters = Counters(role=role, role_epoch=epoch)
    said = WorkerSaid(incarnation=Incarnation(worker), events=(), counters=counters)
    return core.handle(said, now_s)


def busy(core: RouterCore, worker: Incarnation) -> None:
    """With the prompts of other routers."""
    counters = Counters(prefill_waiting_tokens=10**6)
    core.handle(WorkerSaid(incarnation=worker, events=(), counters=counters), 0)


def three() -> RouterCore:
    return core_with(a=Role.PREFILL, b=Role.DECODE, c=Role.DECODE)


def test_its_prompts_are_predicted_in_the_chunks_of_its_new_role() -> None:
    core = RouterCore()
    a, b = (
        replace(hello(name, role), mixed_chunk_tokens=2)
        for name, role in (("a", Role.PREFILL), ("b", Role.DECODE))
    )
    for one in (a, b):
        core.handle(WorkerJoined(hello=one), 0)
    views = [core.state.workers[one] for one in (A, B)]
    assert [view.chunk_tokens for view in views] == [a.prefill_chunk_tokens, 2]
    takes(core, "b", Role.PREFILL)
    takes(core, "a", Role.DECODE)
    assert [view.chunk_tokens for view in views] == [2, b.prefill_chunk_tokens]


def roles(core: RouterCore) -> list[Role]:
    return [core.state.workers[one].role for one in (A, B, C)]


def test_it_gets_the_other_kind_of_work_from_then_on() -> None:
    core = three()
    takes(core, "b", Role.PREFILL)
    takes(core, "a", Role.DECODE)
    assert roles(core) == [Role.DECODE, Role.PREFILL, Role.DECODE]
    (asked,) = submit(core)
    assert isinstance(asked, Send) and isinstance(asked.message, Reserve)
    assert asked.message.source == B
    assert asked.worker in (A, C)


def test_only_a_later_epoch_counts() -> None:
    core = three()
    takes(core, "b", Role.PREFILL, epoch=3)
    takes(core, "b", Role.DECODE, epoch=2)
    assert roles(core)[1] is Role.PREFILL
    takes(core, "b", Role.DECODE, epoch=4)
    assert roles(core)[1] is Role.DECODE


def test_one_that_never_flipped_has_the_role_of_its_hello() -> None:
    core = three()
    takes(core, "b", Role.DECODE, epoch=0)
    assert roles(core) == [Role.PREFILL, Role.DECODE, Role.DECODE]


@pytest.mark.parametrize("who", ["prefills", "decodes", "both"])
def test_what_it_was_sent_before_is_served(who: str) -> None:
    """Wherever the request is: reserved, prefilling or decoding."""
    core = three()
    submit(core)
    decode = core.state.requests["r"].workers[0]
    if who in ("prefills", "both"):
        takes(core, "a", Role.DECODE)
    *_, prompt = says(core, decode, reserved())
    assert isinstance(prompt, Send) and isinstance(prompt.message, Prefill)
    assert prompt.worker == A
    if who in ("decodes", "both"):
        takes(core, decode, Role.PREFILL)
    assert delivered(says(core, "a", tokens(0, 10))) == [(10,)]
    says(core, decode, lifetime("handoff_committed"))
    says(core, "a", released())
    end = says(core, decode, tokens(1, 11, reason=FinishReason.STOP), released())
    assert delivered(end) == [(11,)]
    assert_no_books(core)
    core.validate()


def test_where_the_last_of_a_role_flips_the_others_do_both() -> None:
    core = three()
    takes(core, "a", Role.DECODE)
    assert roles(core) == [Role.BOTH] * 3
    takes(core, "c", Role.PREFILL)
    assert roles(core) == [Role.DECODE, Role.DECODE, Role.PREFILL]


def test_one_that_prefills_from_then_on_computes_what_is_preloaded() -> None:
    core = RouterCore(preloads=(spec("pre"),))
    for name, role in (("a", Role.PREFILL), ("b", Role.DECODE), ("c", Role.DECODE)):
        core.handle(WorkerJoined(hello=hello(name, role)), 0)
    assert takes(core, "b", Role.PREFILL) == [Send(worker=B, message=Preload(spec=spec("pre")))]
    assert takes(core, "b", Role.DECODE, epoch=2) == []


def test_prompts_in_the_shared_queue_go_to_those_that_prefill_now() -> None:
    workers = Workers()
    core = RouterCore(RouterState(workers=workers, dispatch=open_shared_queue(workers, ONE_TIER)))
    for name, role in (("a", Role.PREFILL), ("b", Role.DECODE), ("c", Role.DECODE)):
        core.handle(WorkerJoined(hello=hello(name, role)), 0)
    busy(core, A)
    submit(core)
    says(core, core.state.requests["r"].workers[0], reserved())
    assert len(core.state.dispatch.queued) == 1
    told = takes(core, "b", Role.PREFILL)
    assert [one.worker for one in told if isinstance(one, Send)] == [B]
    assert not core.state.dispatch.queued
    core.validate()


def test_where_nobody_prefills_any_more_nothing_waits_for_a_prefill_worker() -> None:
    workers = Workers()
    core = RouterCore(RouterState(workers=workers, dispatch=open_shared_queue(workers, ONE_TIER)))
    for name, role in (("a", Role.PREFILL), ("b", Role.DECODE)):
        core.handle(WorkerJoined(hello=hello(name, role)), 0)
    busy(core, A)
    submit(core)
    says(core, "b", reserved())
    (waits,) = core.state.dispatch.queued
    takes(core, "a", Role.DECODE)
    assert not core.state.dispatch.queued
    assert core.state.requests[waits.request_id].tries == 1
    core.validate()
