"""A request that is moved while it decodes: no token is lost, repeated or late without need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.counters import Counters
from kvrelay.messages import Abort, Prefill, Reserve, WorkerHello
from kvrelay.types import FinishReason, Incarnation, RequestSpec, Role
from router.core.core import RouterCore
from router.core.events import (
    Aborted,
    Command,
    Send,
    Submitted,
    WorkerJoined,
    WorkerLost,
    WorkerSaid,
)
from router.core.migration import LEAVE_LOOK_S, LEAVING_AT_ONCE, LOOK_S, Moving
from router.core.router_state import MoveCause, RouterState
from router.core.state.quarantine import Pair
from tests.unit.router_kit import (
    PROMPT,
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
from tests.unit.test_router_core import assert_no_books, delivered

D, D2 = Incarnation("d"), Incarnation("d2")
MOST = 60


def asked(attempt: int, *emitted: int) -> RequestSpec:
    sampling = request(max_tokens=MOST).sampling
    return replace(spec(attempt=attempt, emitted=emitted), sampling=sampling)


def decoding(*, moves: bool = True) -> RouterCore:
    """One request with three tokens at d; d2 comes when all is full there."""
    core = RouterCore(RouterState(moves=Moving(hot_spots=moves)))
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        core.handle(WorkerJoined(hello=wide(name, role)), 0)
    core.handle(Submitted(request=request(max_tokens=MOST)), 1)
    says(core, "d", reserved())
    says(core, "p", tokens(0, 10))
    says(core, "d", lifetime("handoff_committed"), tokens(1, 11, 12))
    says(core, "p", released())
    core.handle(WorkerJoined(hello=wide("d2", Role.DECODE)), 2)
    return core


def wide(name: str, role: Role) -> WorkerHello:
    return replace(hello(name, role, max_model_len=128), total_blocks=20, kv_token_bytes=1)


def pressed(core: RouterCore, now_s: float, active: int = 19) -> list[Command]:
    counters = Counters(active_blocks=active, running=1)
    return core.handle(WorkerSaid(incarnation=D, events=(), counters=counters), now_s)


def sends(commands: list[Command]) -> list[Send]:
    return [one for one in commands if isinstance(one, Send)]


def moving(core: RouterCore) -> RouterCore:
    assert pressed(core, 3) == [
        Send(worker=D2, message=Reserve(spec=asked(1, 10, 11, 12), source=D))
    ]
    return core


def test_it_decodes_on_until_the_target_has_room_then_goes() -> None:
    core = moving(decoding())
    assert delivered(says(core, "d", tokens(3, 13))) == [(13,)]
    (prefill,) = says(core, "d2", reserved(attempt=1))
    assert isinstance(prefill, Send) and isinstance(prefill.message, Prefill)
    assert (prefill.worker, prefill.message.target) == (D, D2)
    assert prefill.message.leaves == 0, "the attempt that ends there"
    assert prefill.message.spec == replace(asked(1, 10, 11, 12), resumed=((13,),))
    assert says(core, "d", tokens(4, 14), released()) == []  # the old attempt is over
    last = says(core, "d2", lifetime("handoff_committed", attempt=1), tokens(4, 14, attempt=1))
    assert delivered(last) == [(14,)]
    assert core.state.requests["r"].workers == (D2,)
    end = says(core, "d2", tokens(5, 15, attempt=1, reason=FinishReason.STOP))
    assert delivered(end) == [(15,)]
    says(core, "d", released(attempt=1))
    says(core, "d2", released(attempt=1))
    assert_no_books(core)
    assert core.state.moves.moved == {MoveCause.LEAVING: 0, MoveCause.HOT_SPOT: 1}


def test_a_second_move_takes_all_that_was_delivered_as_prompt() -> None:
    core = moving(decoding())
    says(core, "d", tokens(3, 13))
    says(core, "d2", reserved(attempt=1), lifetime("handoff_committed", attempt=1))
    says(core, "d2", tokens(4, 14, attempt=1))
    assert core.state.requests["r"].spec.resumed == ((13,),)
    again = core.state.requests["r"].next_spec(2)
    assert (again.emitted_ids, again.resumed) == ((10, 11, 12, 13, 14), ())


def test_what_the_move_finds_cached_is_none_of_the_clients() -> None:
    """The worker that it leaves has all of it."""
    core = moving(decoding())
    core.state.requests["r"].found_tokens = 1
    says(core, "d2", reserved(attempt=1))
    says(core, "d", replace(lifetime("prefill_started", attempt=1), tokens=6))
    assert core.state.requests["r"].cached_tokens == 1


def test_refused_it_stays_as_it_was() -> None:
    core = moving(decoding())
    assert says(core, "d2", refused("kv_exhausted", attempt=1)) == []
    assert delivered(says(core, "d", tokens(3, 13))) == [(13,)]
    assert core.state.workers[D2].outlook.sequences == len(core.state.workers[D].queue) == 0
    assert not any(core.state.moves.moved.values())


def test_what_ends_meanwhile_gives_the_new_place_back() -> None:
    core = moving(decoding())
    says(core, "d", tokens(3, 13, reason=FinishReason.STOP), released())
    assert says(core, "d2", reserved(attempt=1)) == [
        Send(worker=D2, message=Abort(key=key(attempt=1)))
    ]
    says(core, "d2", released(attempt=1))
    assert_no_books(core)


def test_what_is_aborted_meanwhile_gives_the_new_place_back() -> None:
    core = moving(decoding())
    core.handle(Aborted(request_id="r"), 3)
    assert Send(worker=D2, message=Abort(key=key(attempt=1))) in says(
        core, "d2", reserved(attempt=1)
    )
    says(core, "d", released())
    says(core, "d2", released(attempt=1))
    assert_no_books(core)


def test_a_lost_target_changes_nothing() -> None:
    core = moving(decoding())
    assert core.handle(WorkerLost(incarnation=D2), 4) == []
    assert delivered(says(core, "d", tokens(3, 13))) == [(13,)]
    assert len(core.state.workers[D].queue) == 0


def test_a_lost_source_is_an_ordinary_loss() -> None:
    core = moving(decoding())
    again = core.handle(WorkerLost(incarnation=D), 4)
    assert [type(s.message) for s in again if isinstance(s, Send)] == [Reserve]
    assert says(core, "d2", reserved(attempt=1)) == [
        Send(worker=D2, message=Abort(key=key(attempt=1)))
    ]
    assert core.state.requests["r"].key == key(attempt=2)


def test_a_failed_handoff_resumes_behind_all_that_was_delivered() -> None:
    core = moving(decoding())
    says(core, "d", tokens(3, 13))
    says(core, "d2", reserved(attempt=1))
    says(core, "d", failed("transfer_failed", attempt=1))
    assert core.state.requests["r"].spec == asked(2, 10, 11, 12, 13)


def test_no_second_move_while_one_is_under_way_and_no_look_at_every_message() -> None:
    core = moving(decoding())
    assert pressed(core, 3 + LOOK_S / 2) == []
    assert pressed(core, 3 + LOOK_S) == []


def test_never_over_a_pair_that_is_quarantined_or_failed_for_it() -> None:
    core, pair = decoding(), Pair(D, D2)
    back_off_s = core.state.quarantine.failed(pair, "transfer_failed", 2)
    assert back_off_s is not None
    assert pressed(core, 3) == []
    core.state.requests["r"].avoided.add(pair)
    assert pressed(core, 2 + back_off_s) == []
    core.state.requests["r"].avoided.clear()
    assert len(pressed(core, 2 + back_off_s + LOOK_S)) == 1


def test_never_to_a_worker_that_drains() -> None:
    """Which its refusal of some other request has told."""
    core, worker = decoding(), D2
    core.handle(Submitted(request=request("other", max_tokens=MOST)), 2)
    at = core.state.requests["other"]
    if at.workers[0] != worker:  # it asks that one next
        says(core, at.workers[0], refused("kv_exhausted", "other", at.attempt))
    assert worker in at.workers
    says(core, worker, refused("draining", "other", at.attempt))
    assert core.state.workers[worker].draining
    assert all(not isinstance(one.message, Reserve) for one in sends(pressed(core, 3)))


# --- away from a worker that drains ---------------------------------------------------------------


def drains(core: RouterCore, now_s: float, worker: Incarnation = D, running: int = 1) -> list[Send]:
    counters = Counters(active_blocks=2, running=running, draining=True)
    return sends(core.handle(WorkerSaid(incarnation=worker, events=(), counters=counters), now_s))


@pytest.mark.parametrize("moves", [True, False])
def test_what_decodes_leaves_a_worker_that_drains(moves: bool) -> None:
    """Also where hot spots are not relieved, and however often it was moved."""
    core = decoding(moves=moves)
    core.state.requests["r"].moves = 9
    assert drains(core, 3) == [
        Send(worker=D2, message=Reserve(spec=asked(1, 10, 11, 12), source=D))
    ]
    assert drains(core, 3 + LEAVE_LOOK_S) == [], "it is asked for once"
    assert delivered(says(core, "d", tokens(3, 13))) == [(13,)]
    (prefill,) = sends(says(core, "d2", reserved(attempt=1)))
    assert isinstance(prefill.message, Prefill)
    assert prefill.message.leaves == 0, "a worker that drains takes it"
    assert prefill.message.spec.resumed == ((13,),)
    assert drains(core, 4) == [], "its handoff goes on"
    says(core, "d2", lifetime("handoff_committed", attempt=1), tokens(4, 14, attempt=1))
    at = core.state.requests["r"]
    assert (at.workers, at.moves, at.tries, at.led_away) == ((D2,), 9, 1, 1)
    assert at.disturbed, "its pace says nothing"
    says(core, "d", released(), released(attempt=1))
    end = says(core, "d2", tokens(5, 15, attempt=1, reason=FinishReason.STOP))
    assert delivered(end) == [(15,)]
    says(core, "d2", released(attempt=1))
    assert_no_books(core)


def test_it_stays_where_no_other_has_room_and_goes_as_soon_as_one_has() -> None:
    core = decoding()
    core.state.workers[D2].draining = True
    assert drains(core, 3) == []
    core.state.workers[D2].draining = False
    core.state.workers[D2].counters = Counters(running=hello("x", Role.DECODE).max_running_requests)
    assert drains(core, 4) == []
    core.state.workers[D2].counters = Counters()
    assert [one.worker for one in drains(core, 5)] == [D2]


def test_a_target_that_refuses_is_asked_again() -> None:
    core = decoding()
    drains(core, 3)
    says(core, "d2", refused("kv_exhausted", attempt=1))
    assert [one.worker for one in drains(core, 4)] == [D2]


def test_so_many_leave_at_a_time() -> None:
    core = decoding()
    for worker in (D, D2):
        view = core.state.workers[worker]
        view.hello = replace(view.hello, total_blocks=2000, max_running_requests=64)
    for number in range(LEAVING_AT_ONCE + 3):
        name = f"r{number}"
        core.state.workers[D2].draining = True
        core.handle(Submitted(request=request(name, max_tokens=MOST)), 2)
        core.state.workers[D2].draining = False
        attempt = core.state.requests[name].attempt
        says(core, "d", reserved(name, attempt))
        says(core, "p", tokens(0, 10, name=name, attempt=attempt))
        says(core, "d", lifetime("handoff_committed", name, attempt))
        says(core, "p", released(name, attempt))
    assert len(drains(core, 3)) == LEAVING_AT_ONCE


def test_a_prompt_that_is_not_begun_goes_to_another_prefill_worker() -> None:
    core = decoding()
    core.handle(WorkerJoined(hello=wide("p2", Role.PREFILL)), 2)
    core.handle(Submitted(request=request("new", max_tokens=MOST)), 2)
    at = core.state.requests["new"]
    decode, prefiller = at.workers
    says(core, decode, reserved("new", at.attempt))
    told = drains(core, 3, prefiller)
    assert Send(worker=prefiller, message=Abort(key=key("new", at.attempt - 1))) in told
    assert at.workers[1] != prefiller
    assert at.tries == 1
    says(core, at.workers[0], reserved("new", at.attempt))
    says(core, at.workers[1], lifetime("prefill_started", "new", at.attempt))
    core.state.workers[prefiller].draining = False
    assert drains(core, 4, at.workers[1]) == [], "what has begun is handed over"


def test_a_prompt_that_is_not_begun_waits_for_no_decode_worker_that_drains() -> None:
    core = decoding()
    core.handle(Submitted(request=request("new", max_tokens=MOST)), 2)
    at = core.state.requests["new"]
    decode = at.workers[0]
    says(core, decode, reserved("new", at.attempt))
    drains(core, 3, decode)
    assert at.workers[0] != decode


def test_nobody_is_led_away_from_the_only_worker() -> None:
    core = decoding()
    core.handle(WorkerLost(incarnation=D2), 2)
    core.handle(Submitted(request=request("new", max_tokens=MOST)), 2)
    at = core.state.requests["new"]
    says(core, "d", reserved("new", at.attempt))
    for worker in at.workers:
        assert drains(core, 3, worker) == []
    assert at.workers == (D, Incarnation("p"))


def test_a_target_that_drains_unknown_to_the_router_changes_nothing() -> None:
    core = moving(decoding())
    assert says(core, "d2", refused("draining", attempt=1)) == []
    assert delivered(says(core, "d", tokens(3, 13))) == [(13,)]
    assert pressed(core, 3 + LOOK_S) == [], "now it is known"


def test_only_a_worker_that_will_overflow_and_only_when_asked_for() -> None:
    assert pressed(decoding(), 3, active=2) == []
    assert pressed(decoding(moves=False), 3) == []
    assert len(PROMPT) == 3
