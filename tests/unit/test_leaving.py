"""Several answers to one prompt leave a worker that drains: together, in one move. Nothing is lost,
repeated or counted against the request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.counters import Counters
from kvrelay.messages import Abort, Prefill, Reserve, Stop
from kvrelay.types import FinishReason, Incarnation, RequestKey, Role
from router.core.core import RouterCore
from router.core.events import (
    Aborted,
    ChoiceStopped,
    Command,
    Send,
    WorkerJoined,
    WorkerLost,
    WorkerSaid,
)
from router.core.migration import LEAVING_AT_ONCE, MOST_MOVES, Moving
from router.core.request import MAX_ATTEMPTS, Request, RequestState
from router.core.router_state import MoveCause
from router.core.state.quarantine import Pair
from tests.unit.router_kit import (
    core_with,
    failed,
    hello,
    key,
    lifetime,
    refused,
    released,
    reserved,
    says,
    spec,
    submit,
    tokens,
)
from tests.unit.test_router_core import assert_no_books, delivered

P, D, D2, D3 = Incarnation("p"), Incarnation("d"), Incarnation("d2"), Incarnation("d3")


def join(core: RouterCore, name: str, *, places: int = 4) -> None:
    core.handle(WorkerJoined(hello=hello(name, Role.DECODE, places=places)), 2)


def opened() -> RouterCore:
    core = core_with(p=Role.PREFILL, d=Role.DECODE, places=40)
    core.state.moves = Moving(hot_spots=False)
    return core


def decoding(name: str = "r", *, n: int = 2, core: RouterCore | None = None) -> RouterCore:
    """Each choice has three tokens, the latest two from d."""
    core = core or opened()
    submit(core, name, n=n)
    attempt = core.state.requests[name].attempt
    says(core, "d", reserved(name, attempt))
    choices = range(n)
    says(core, "p", *[tokens(0, 10, name=name, attempt=attempt, choice=c) for c in choices])
    says(core, "d", lifetime("handoff_committed", name, attempt))
    says(core, "p", released(name, attempt))
    more = [tokens(1, 11, 12, name=name, attempt=attempt, choice=c) for c in choices]
    says(core, "d", *more)
    return core


def leaving(n: int = 2) -> RouterCore:
    """d2 was asked to take it."""
    core = decoding(n=n)
    join(core, "d2")
    assert asked(drains(core)) == [(D2, key(attempt=1))]
    return core


def drains(core: RouterCore, worker: str = "d", now_s: float = 3) -> list[Command]:
    commands = says(core, worker, draining=True, now_s=now_s)
    core.validate()
    return commands


def asked(commands: list[Command]) -> list[tuple[Incarnation, RequestKey]]:
    sends = [one for one in commands if isinstance(one, Send)]
    return [(one.worker, one.message.spec.key) for one in sends if isinstance(one.message, Reserve)]


def prefills(commands: list[Command]) -> list[Prefill]:
    sends = [one.message for one in commands if isinstance(one, Send)]
    return [message for message in sends if isinstance(message, Prefill)]


def the(core: RouterCore, name: str = "r") -> Request:
    return core.state.requests[name]


def test_prompts_stay_where_they_are_once_nobody_else_has_room() -> None:
    core = opened()
    for name in ("a", "b", "c"):
        submit(core, name)
        says(core, "d", reserved(name, core.state.requests[name].attempt))
    join(core, "d2", places=1)
    told = asked(drains(core))
    assert [worker for worker, _ in told] == [D2]
    assert sum(D in one.workers for one in core.state.requests.values()) == 2


# --- a move ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3])
def test_all_choices_go_on_at_another_worker(n: int) -> None:
    core = decoding(n=n)
    join(core, "d2")
    (ask,) = drains(core)
    before = ((10, 11, 12),) * n if n > 1 else ()
    expected = replace(spec(attempt=1, n=n, emitted=(10, 11, 12) if n == 1 else ()), resumed=before)
    assert ask == Send(worker=D2, message=Reserve(spec=expected, source=D))
    assert delivered(says(core, "d", tokens(3, 13))) == [(13,)]

    (prefill,) = prefills(says(core, "d2", reserved(attempt=1)))
    now = ((13,),) if n == 1 else ((10, 11, 12, 13), *before[1:])
    assert prefill.spec == replace(expected, resumed=now)
    assert (prefill.target, prefill.leaves, prefill.since) == (D2, 0, (1, 0, 0)[:n])
    core.validate()
    says(core, "d", released(), lifetime("prefill_started", attempt=1), draining=True)
    says(core, "d2", lifetime("handoff_committed", attempt=1))
    says(core, "d", released(attempt=1), draining=True)
    assert drains(core, now_s=4) == [], "it has nothing any more"
    for choice in range(n):
        first = 4 if choice == 0 else 3
        last = tokens(first, 20, attempt=1, choice=choice, reason=FinishReason.STOP)
        assert delivered(says(core, "d2", last)) == [(20,)]
    says(core, "d2", released(attempt=1))
    assert_no_books(core)
    assert core.state.moves.moved == {MoveCause.LEAVING: 1, MoveCause.HOT_SPOT: 0}


def test_a_second_move_takes_all_along() -> None:
    core = leaving()
    says(core, "d", tokens(3, 13))
    says(core, "d2", reserved(attempt=1), lifetime("handoff_committed", attempt=1))
    says(core, "d2", tokens(3, 23, 24, attempt=1, choice=1))
    says(core, "d", released(), released(attempt=1), draining=True)
    join(core, "d3")
    (ask,) = drains(core, "d2", now_s=4)
    assert isinstance(ask, Send) and isinstance(ask.message, Reserve)
    assert (ask.worker, ask.message.source) == (D3, D2)
    assert ask.message.spec.resumed == ((10, 11, 12, 13), (10, 11, 12, 23, 24))


def test_moves_count_neither_as_tries_nor_as_moves() -> None:
    core = decoding()
    for at in range(MOST_MOVES + MAX_ATTEMPTS):
        source, target = f"d{at or ''}", f"d{at + 1}"
        join(core, target)
        attempt = the(core).attempt + 1
        assert asked(drains(core, source, now_s=3 + at)) == [(target, key(attempt=attempt))]
        says(core, target, reserved(attempt=attempt))
        says(core, source, released(attempt=attempt - 1), draining=True)
        says(core, target, lifetime("handoff_committed", attempt=attempt))
        says(core, source, released(attempt=attempt), draining=True)
        for choice in (0, 1):
            says(core, target, tokens(3 + at, 13, attempt=attempt, choice=choice))
    request = the(core)
    assert (request.tries, request.failures, request.deaths, request.moves) == (1, 0, 0, 0)
    assert request.disturbed, "its time says nothing of a prediction"


# --- what happens meanwhile -----------------------------------------------------------------------


def test_a_choice_that_ends_meanwhile_stays_ended() -> None:
    core = leaving(n=3)
    says(core, "d", tokens(3, 13, choice=1, reason=FinishReason.STOP))
    core.handle(ChoiceStopped(request_id="r", choice=2, valid_tokens=3), 3.1)
    told = says(core, "d2", reserved(attempt=1))
    (prefill,) = prefills(told)
    assert prefill.spec.resumed == ((10, 11, 12), (), ())
    assert (prefill.spec.finished_choices, prefill.since) == ((1, 2), (0, 0, 0))
    stops = [one.message for one in told if isinstance(one, Send) and one.worker == D2]
    assert [one.choice for one in stops if isinstance(one, Stop)] == [1, 2]


@pytest.mark.parametrize("ends", ["all choices", "aborted"])
def test_what_ends_meanwhile_gives_the_new_place_back(ends: str) -> None:
    core = leaving()
    if ends == "aborted":
        core.handle(Aborted(request_id="r"), 3)
    else:
        says(core, "d", *[tokens(3, 13, choice=c, reason=FinishReason.STOP) for c in (0, 1)])
    assert says(core, "d2", reserved(attempt=1)) == [
        Send(worker=D2, message=Abort(key=key(attempt=1)))
    ]
    says(core, "d", released())
    says(core, "d2", released(attempt=1))
    assert_no_books(core)


def test_refused_it_decodes_on_and_asks_again() -> None:
    core = leaving()
    assert asked(says(core, "d2", refused("kv_exhausted", attempt=1))) == []
    assert delivered(says(core, "d", tokens(3, 13, choice=1))) == [(13,)]
    assert asked(drains(core, now_s=4)) == [(D2, key(attempt=2))]


def test_a_target_that_is_lost_is_followed_by_another() -> None:
    core = leaving()
    assert core.handle(WorkerLost(incarnation=D2), 3.1) == []
    join(core, "d3")
    assert asked(drains(core, now_s=4)) == [(D3, key(attempt=2))]


def test_a_worker_that_dies_while_it_is_left_is_an_ordinary_loss() -> None:
    core = leaving()
    says(core, "d", tokens(3, 13, choice=1))
    says(core, "d2", reserved(attempt=1))
    again = core.handle(WorkerLost(incarnation=D), 4)
    assert asked(again) == [(D2, key(attempt=2))]
    assert the(core).spec.resumed == ((10, 11, 12), (10, 11, 12, 13))
    core.validate()


def test_a_move_that_fails_is_no_failure_of_the_request() -> None:
    core = leaving()
    says(core, "d2", reserved(attempt=1))
    (again,) = asked(says(core, "d", failed("transfer_failed", attempt=1), draining=True))
    request = the(core)
    assert again == (D2, key(attempt=2))
    assert (request.tries, request.failures) == (1, 0)
    assert request.spec.resumed == ((10, 11, 12),) * 2
    says(core, "d2", reserved(attempt=2))
    says(core, "p", failed("transfer_failed", attempt=2))
    assert (request.tries, request.failures) == (2, 1), "that one was no move"


def test_a_worker_that_took_it_fails_it_as_any_other_does() -> None:
    core = leaving()
    says(core, "d2", reserved(attempt=1), lifetime("handoff_committed", attempt=1))
    says(core, "d2", failed("internal", attempt=1))
    assert (the(core).tries, the(core).failures) == (2, 1)


@pytest.mark.parametrize("most", [3, 2])
def test_a_target_that_answers_too_late_does_not_get_it(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """What was emitted since would not fit the commit."""
    monkeypatch.setattr("router.core.migration.MOST_SINCE_TOKENS", most)
    core = leaving()
    says(core, "d", tokens(3, 13), tokens(3, 13, 14, choice=1))
    told = says(core, "d2", reserved(attempt=1))
    assert bool(prefills(told)) is (most == 3)
    core.validate()
    if most == 2:
        assert told == [Send(worker=D2, message=Abort(key=key(attempt=1)))]
        (ask,) = drains(core, now_s=4)
        assert isinstance(ask, Send) and isinstance(ask.message, Reserve)
        assert ask.message.spec.resumed == ((10, 11, 12, 13), (10, 11, 12, 13, 14))


# --- room -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("free", "goes"), [(1, False), (2, True)])
def test_all_choices_go_together_or_none(free: int, goes: bool) -> None:
    core = decoding()
    join(core, "d2")
    says(core, "d2", running=4 - free)
    assert bool(drains(core)) is goes
    assert the(core).state is RequestState.DECODING, "it decodes on"


def test_no_more_are_asked_for_than_there_are_places() -> None:
    core = decoding("a", n=3)
    decoding("b", n=3, core=core)
    for name, more in (("d2", [D2]), ("d3", [D3])):
        join(core, name, places=5)
        view = core.state.workers[Incarnation(name)]
        view.hello = replace(view.hello, total_blocks=1000)
        now_s = 3 + len(core.state.workers)
        assert [worker for worker, _ in asked(drains(core, now_s=now_s))] == more


def test_those_that_fit_nowhere_do_not_hold_up_the_others() -> None:
    core = opened()
    for number in range(LEAVING_AT_ONCE):
        decoding(f"two{number}", core=core)
    decoding("one", n=1, core=core)
    join(core, "d2", places=1)
    (ask,) = asked(drains(core))
    assert ask[1].request_id == "one"


def test_a_target_whose_handoffs_fail_does_not_hold_up_a_drain() -> None:
    """Not even where it is the least loaded one."""
    core = decoding()
    join(core, "d2")
    join(core, "d3")
    says(core, "d3", running=1)
    core.state.quarantine.failed(Pair(D, D2), "transfer_failed", 2.9)
    assert asked(drains(core)) == [(D3, key(attempt=1))]


def test_the_prompt_of_all_choices_is_in_the_same_blocks() -> None:
    """Eight choices, each with a context of half the memory."""
    core = decoding(n=8)
    request = the(core)
    blocks = hello("x", Role.DECODE).total_blocks
    prompt = (1,) * (hello("x", Role.DECODE).block_size * blocks // 2)
    request.submitted = replace(request.submitted, prompt_ids=prompt)
    join(core, "d2", places=8)
    view = core.state.workers[D2]
    view.hello = replace(view.hello, total_blocks=2 * blocks)
    assert [worker for worker, _ in asked(drains(core))] == [D2]


def test_only_when_all_choices_are_there() -> None:
    """The prefill worker is needed until its first tokens have come."""
    core = opened()
    submit(core, n=2)
    says(core, "d", reserved())
    says(core, "p", lifetime("prefill_started"), tokens(0, 10))
    says(core, "d", lifetime("handoff_committed"), tokens(1, 11))
    join(core, "d2")
    assert drains(core) == []
    says(core, "p", tokens(0, 10, choice=1))
    assert asked(drains(core, now_s=4)) == [(D2, key(attempt=1))]


def test_each_router_moves_its_own() -> None:
    """Both hear it from the same report."""
    ours, theirs = decoding("ours"), decoding("theirs")
    told = Counters(running=4, draining=True)
    for core, name in ((ours, "ours"), (theirs, "theirs")):
        join(core, "d2")
        said = WorkerSaid(incarnation=D, events=(), counters=told)
        assert asked(core.handle(said, 3)) == [(D2, key(name, attempt=1))]
