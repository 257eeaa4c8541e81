from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from kvrelay.messages import Abort, Generate, Lifetime, Prefill, Reserve, Stop
from kvrelay.types import FinishReason, Incarnation, Objectives, Role
from router.core.core import RouterCore
from router.core.decision import demand_of
from router.core.events import (
    Aborted,
    Admit,
    ChoiceStopped,
    Command,
    DeadlinePassed,
    Deliver,
    Fail,
    Refuse,
    Send,
    Submitted,
    WorkerJoined,
    WorkerLost,
)
from router.core.promises.refusal import NO_CAPACITY, Refusal
from router.core.request import MAX_ATTEMPTS
from router.core.router_state import RouterState
from router.core.state.waiting import ASK_AGAIN_S, FAILOVER_PATIENCE_S
from tests.unit.router_kit import (
    STEP_TIMES,
    core_with,
    failed,
    hello,
    key,
    lifetime,
    piece,
    refused,
    released,
    request,
    reserved,
    says,
    spec,
    split,
    submit,
    tokens,
)

P, D, D2, P2 = Incarnation("p"), Incarnation("d"), Incarnation("d2"), Incarnation("p2")
LENGTH = FinishReason.LENGTH
moments = count(1)


def running(core: RouterCore, *, n: int = 1) -> RouterCore:
    """A request that was admitted, prefilled and handed over, with token 0 of each choice."""
    submit(core, n=n)
    says(core, "d", reserved())
    says(core, "p", *[tokens(0, 10, choice=choice) for choice in range(n)])
    says(core, "d", lifetime("handoff_committed"))
    says(core, "p", released())
    return core


def delivered(commands: list[Command]) -> list[tuple[int, ...]]:
    return [t.token_ids for c in commands if isinstance(c, Deliver) for t in c.tokens]


def assert_no_books(core: RouterCore) -> None:
    assert not core.state.requests
    for view in core.state.workers.values():
        assert view.outlook.sequences == len(view.queue) == 0, view


def test_from_submission_to_the_last_token() -> None:
    core = split()
    assert submit(core) == [Send(worker=D, message=Reserve(spec=spec(), source=P))]
    assert says(core, "d", reserved()) == [
        Admit(request_id="r"),
        Send(worker=P, message=Prefill(spec=spec(), target_addresses=("loopback:d",), target=D)),
    ]
    assert says(core, "p", lifetime("prefill_started"), tokens(0, 10)) == [
        Deliver(request_id="r", tokens=(piece(10),), done=False)
    ]
    assert says(core, "d", lifetime("handoff_committed"), tokens(1, 11, 12)) == [
        Deliver(request_id="r", tokens=(piece(11, 12),), done=False)
    ]
    assert says(core, "d", tokens(3, 13, reason=LENGTH)) == [
        Deliver(request_id="r", tokens=(piece(13, reason=LENGTH),), done=True)
    ]
    assert says(core, "p", released()) == []
    assert says(core, "d", released()) == []
    assert_no_books(core)


def test_a_first_token_that_is_the_last_is_told_to_the_decode_worker() -> None:
    """It may never hear of it from the prefill worker, whose connection may break."""
    core = split()
    submit(core)
    says(core, "d", reserved())
    assert says(core, "p", tokens(0, 10, reason=LENGTH), released()) == [
        Deliver(request_id="r", tokens=(piece(10, reason=LENGTH),), done=True),
        Send(worker=D, message=Abort(key=key())),
    ]
    assert says(core, "d", released()) == []
    assert_no_books(core)


def test_a_worker_of_both_roles_does_all() -> None:
    core = core_with(b=Role.BOTH)
    b = Incarnation("b")
    assert submit(core) == [Send(worker=b, message=Generate(spec=spec()))]
    assert says(core, "b", reserved()) == [Admit(request_id="r")]
    assert delivered(says(core, "b", tokens(0, 10), tokens(1, 11, reason=LENGTH))) == [(10,), (11,)]
    says(core, "b", released())
    assert_no_books(core)


def test_decode_tokens_that_overtake_the_first_one_wait_for_it() -> None:
    core = split()
    submit(core)
    says(core, "d", reserved(), lifetime("handoff_committed"))
    assert says(core, "d", tokens(2, 12, 13)) == []
    assert says(core, "d", tokens(1, 11)) == []
    assert delivered(says(core, "p", tokens(0, 10))) == [(10,), (11,), (12, 13)]


def test_choices_are_ordered_each_for_itself() -> None:
    core = split()
    submit(core, n=2)
    says(core, "d", reserved())
    assert delivered(says(core, "d", tokens(1, 21, choice=1))) == []
    assert delivered(says(core, "p", tokens(0, 10, choice=0))) == [(10,)]
    assert delivered(says(core, "p", tokens(0, 20, choice=1))) == [(20,), (21,)]


def test_duplicates_are_cut_and_nothing_follows_the_end() -> None:
    core = running(split(), n=2)
    assert delivered(says(core, "d", tokens(1, 11, 12))) == [(11, 12)]
    assert delivered(says(core, "d", tokens(1, 11, 12))) == []
    assert delivered(says(core, "d", tokens(2, 12, 13, reason=LENGTH))) == [(13,)]
    assert delivered(says(core, "d", tokens(4, 14))) == []


def test_what_an_old_attempt_or_a_stranger_says_is_dropped() -> None:
    core = split()
    core.handle(WorkerJoined(hello=hello("d2", Role.DECODE)), 0)
    submit(core)
    says(core, "d", reserved())
    says(core, "p", failed("transfer_failed"))
    assert says(core, "p", tokens(0, 10)) == []
    assert says(core, "d", reserved()) == []
    assert says(core, "x", tokens(0, 10, attempt=1)) == []
    assert says(core, "d", tokens(0, 10, attempt=1)) == []
    says(core, "d2", reserved(attempt=1))
    assert delivered(says(core, "p", tokens(0, 10, attempt=1))) == [(10,)]


def test_the_next_decode_worker_is_asked_then_it_is_refused() -> None:
    core = core_with(p=Role.PREFILL, d=Role.DECODE, d2=Role.DECODE)
    submit(core)
    assert says(core, "d", refused("kv_exhausted")) == [
        Send(worker=D2, message=Reserve(spec=spec(), source=P))
    ]
    assert says(core, "d2", refused("slots_exhausted")) == [
        Refuse(
            request_id="r",
            refusal=Refusal(
                reason="slots_exhausted",
                message="all places of every decode worker are taken",
                retry_after_s=1.0,
            ),
        )
    ]
    assert_no_books(core)


def test_without_workers_there_is_no_capacity() -> None:
    for core in (RouterCore(), core_with(d=Role.DECODE), core_with(p=Role.PREFILL)):
        refusal = replace(NO_CAPACITY, retry_after_s=1.0)
        assert submit(core) == [Refuse(request_id="r", refusal=refusal)]
        assert_no_books(core)


def test_what_the_router_knows_to_be_full_is_not_asked() -> None:
    core = split(places=2)
    submit(core, "a", n=2)
    (refuse,) = submit(core, "b")
    assert isinstance(refuse, Refuse)
    assert refuse.refusal.reason == "slots_exhausted"
    says(core, "d", refused("kv_exhausted", "a"))
    assert isinstance(submit(core, "c")[0], Send)


def test_the_retry_time_is_the_mean_gap_between_ends() -> None:
    core = split()
    for i, end_s in enumerate((10.0, 12.0, 12.5)):
        submit(core, f"r{i}")
        core.handle(Aborted(request_id=f"r{i}"), end_s)
        says(core, "d", released(f"r{i}", i))
    says(core, "p", draining=True)
    (refuse,) = submit(core, "x")
    assert isinstance(refuse, Refuse)
    assert refuse.refusal.retry_after_s == pytest.approx(0.8 * 2.0 + 0.2 * 0.5)


def test_abort_while_reserving_leaves_no_books() -> None:
    """The prefill worker has never heard of it and will not say Released."""
    core = split()
    submit(core)
    assert core.handle(Aborted(request_id="r"), 2) == [
        Send(worker=D, message=Abort(key=key())),
        Send(worker=P, message=Abort(key=key())),
    ]
    assert key() in core.state.workers[D].outlook  # until the worker says so
    says(core, "d", reserved(), released())
    assert_no_books(core)


def test_a_deadline_that_passes_stops_every_leg_and_says_so() -> None:
    core = split()
    asked = replace(request(), objectives=Objectives(deadline_s=1.5))
    core.handle(Submitted(request=asked), 1)
    says(core, "d", reserved())
    assert core.handle(DeadlinePassed(request_id="r"), 2.5) == [
        Send(worker=D, message=Abort(key=key())),
        Send(worker=P, message=Abort(key=key())),
        Fail(
            request_id="r",
            reason="deadline_exceeded",
            message="its deadline of 1.500 s has passed",
        ),
    ]
    says(core, "d", released())
    says(core, "p", released())
    assert_no_books(core)
    assert core.handle(DeadlinePassed(request_id="r"), 3) == []


def test_abort_while_a_refusal_is_on_its_way_leaves_no_books() -> None:
    core = split()
    submit(core)
    core.handle(Aborted(request_id="r"), 2)
    assert says(core, "d", refused("kv_exhausted")) == []
    assert_no_books(core)


def test_abort_after_the_handoff_reaches_the_decode_worker_alone() -> None:
    core = running(split())
    assert core.handle(Aborted(request_id="r"), 3) == [Send(worker=D, message=Abort(key=key()))]
    assert core.handle(Aborted(request_id="r"), 3) == []
    says(core, "d", released())
    assert_no_books(core)


def test_a_stopped_choice_is_told_to_the_decode_worker_and_says_no_more() -> None:
    core = running(split(), n=2)
    stop = ChoiceStopped(request_id="r", choice=1, valid_tokens=1)
    assert core.handle(stop, 3) == [
        Send(worker=D, message=Stop(key=key(), choice=1, valid_tokens=1))
    ]
    assert core.handle(stop, 3) == []
    assert says(core, "d", tokens(1, 21, choice=1)) == []
    assert core.handle(ChoiceStopped(request_id="r", choice=0, valid_tokens=1), 4) == [
        Send(worker=D, message=Abort(key=key()))
    ]
    assert core.handle(ChoiceStopped(request_id="r", choice=0, valid_tokens=1), 4) == []
    says(core, "d", released())
    assert_no_books(core)


def test_a_lost_decode_worker_costs_no_token() -> None:
    """The request goes on behind what was delivered."""
    resumed = spec(attempt=1, emitted=(10, 11, 12))
    core = running(core_with(p=Role.PREFILL, d=Role.DECODE, d2=Role.DECODE))
    assert delivered(says(core, "d", tokens(1, 11, 12))) == [(11, 12)]
    assert core.handle(WorkerLost(incarnation=D), 3) == [
        Send(worker=D2, message=Reserve(spec=resumed, source=P, displaced=True))
    ]
    (prefill,) = says(core, "d2", reserved(attempt=1))  # no second Admit
    assert isinstance(prefill, Send) and isinstance(prefill.message, Prefill)
    assert prefill.message.spec == resumed
    assert len(core.state.workers[P].queue) == 1
    assert delivered(says(core, "p", tokens(3, 13, attempt=1))) == [(13,)]
    assert len(core.state.workers[P].queue) == 0
    assert delivered(says(core, "d2", tokens(4, 14, attempt=1, reason=LENGTH))) == [(14,)]
    says(core, "p", released(attempt=1))
    says(core, "d2", released(attempt=1))
    assert_no_books(core)


def test_a_lost_prefill_worker_is_replaced_before_the_handoff() -> None:
    core = core_with(p=Role.PREFILL, p2=Role.PREFILL, d=Role.DECODE)
    submit(core)
    says(core, "d", reserved())
    assert core.handle(WorkerLost(incarnation=P), 3) == [
        Send(worker=D, message=Abort(key=key())),
        Send(worker=D, message=Reserve(spec=spec(attempt=1), source=P2, displaced=True)),
    ]


@pytest.mark.parametrize("tells", ["at once", "when it is asked"])
def test_a_prefill_worker_that_drains_costs_no_attempt(tells: str) -> None:
    """Its requests go on at another one, as often as it takes."""
    names = [f"p{i}" for i in range(MAX_ATTEMPTS + 2)]
    core = core_with(d=Role.DECODE, **dict.fromkeys(names, Role.PREFILL))
    (asked,) = submit(core)
    for attempt in range(len(names) - 1):
        *_, begun = says(core, "d", reserved(attempt=attempt))
        assert isinstance(begun, Send) and isinstance(begun.message, Prefill)
        source = begun.worker
        refusal = refused("draining", attempt=attempt)
        events = () if tells == "at once" else (refusal,)
        *aborts, asked = says(core, source, *events, draining=True)
        assert Send(worker=D, message=Abort(key=key(attempt=attempt))) in aborts
        assert isinstance(asked, Send) and isinstance(asked.message, Reserve)
        assert asked.message.source != source
        says(core, "d", released(attempt=attempt))
        core.validate()
    assert core.state.requests["r"].tries == 1


def test_nothing_new_goes_to_a_prefill_worker_that_drains() -> None:
    core = core_with(d=Role.DECODE, p=Role.PREFILL, p2=Role.PREFILL)
    says(core, "p", draining=True)
    for name in ("a", "b", "c"):
        (asked,) = submit(core, name)
        assert isinstance(asked, Send) and isinstance(asked.message, Reserve)
        assert asked.message.source == P2


def test_a_lost_prefill_worker_is_not_missed_after_the_handoff() -> None:
    core = running(split())
    assert core.handle(WorkerLost(incarnation=P), 3) == []
    assert delivered(says(core, "d", tokens(1, 11, reason=LENGTH))) == [(11,)]


def test_a_prefill_worker_lost_with_its_first_token_is_missed() -> None:
    """The decode worker has the KV, but token 0 never came."""
    core = split()
    submit(core, n=2)
    says(core, "d", reserved(), lifetime("handoff_committed"))
    says(core, "p", tokens(0, 10, choice=0))
    abort, again = core.handle(WorkerLost(incarnation=P), 3)
    assert abort == Send(worker=D, message=Abort(key=key()))
    assert isinstance(again, Send) and isinstance(again.message, Generate)
    assert again.message.spec.resumed == ((10,), ())
    assert core.state.requests["r"].workers == (D,), "it takes the place of the one that is gone"


def test_a_resumed_request_still_needs_its_prefill_worker() -> None:
    """Tokens of the attempt before don't tell that the next one came."""
    core = running(core_with(p=Role.PREFILL, p2=Role.PREFILL, d=Role.DECODE, d2=Role.DECODE))
    core.handle(WorkerLost(incarnation=D), 3)
    says(core, "d2", reserved(attempt=1), lifetime("handoff_committed", attempt=1))
    prefill = core.state.requests["r"].workers[1]
    lost = core.handle(WorkerLost(incarnation=prefill), 4)
    assert Send(worker=D2, message=Abort(key=key(attempt=1))) in lost
    assert core.state.requests["r"].key == key(attempt=2)


def test_each_choice_goes_on_behind_its_own_tokens() -> None:
    """Whatever another worker would draw for them: the client has them already."""
    core = running(core_with(p=Role.PREFILL, d=Role.DECODE, d2=Role.DECODE), n=2)
    says(core, "d", tokens(1, 11, 12), tokens(1, 21, choice=1))
    resumed = replace(spec(attempt=1, n=2), resumed=((10, 11, 12), (10, 21)))
    assert core.handle(WorkerLost(incarnation=D), 3) == [
        Send(worker=D2, message=Reserve(spec=resumed, source=P, displaced=True))
    ]
    says(core, "d2", reserved(attempt=1), lifetime("handoff_committed", attempt=1))
    assert core.state.requests["r"].workers == (D2,), "the prefill worker draws nothing"
    again = says(core, "d2", tokens(2, 22, choice=1, attempt=1), tokens(3, 13, attempt=1))
    assert delivered(again) == [(22,), (13,)]


def test_a_choice_without_a_token_is_still_drawn_by_the_prefill_worker() -> None:
    core = core_with(p=Role.PREFILL, d=Role.DECODE, d2=Role.DECODE)
    submit(core, n=2)
    says(core, "d", reserved())
    says(core, "p", tokens(0, 10))
    core.handle(WorkerLost(incarnation=D), 3)
    assert core.state.requests["r"].spec.resumed == ((10,), ())
    says(core, "d2", reserved(attempt=1), lifetime("handoff_committed", attempt=1))
    assert core.state.requests["r"].workers == (D2, P)
    assert delivered(says(core, "p", tokens(0, 20, choice=1, attempt=1))) == [(20,)]
    assert core.state.requests["r"].workers == (D2,)


def test_what_was_emitted_counts_as_prompt_and_no_more_as_output() -> None:
    core = running(split())
    demand = demand_of(core.state, core.state.requests["r"], core.state.requests["r"].spec, 3)
    assert (demand.prompt_tokens, demand.longest_tokens) == (3, 11)
    core.state.requests["r"].try_again(1)
    resumed = demand_of(core.state, core.state.requests["r"], core.state.requests["r"].spec, 3)
    assert (resumed.prompt_tokens, resumed.longest_tokens) == (4, 11)
    assert resumed.output_tokens == demand.output_tokens - 1


def test_choices_that_ended_are_not_decoded_again() -> None:
    core = running(core_with(p=Role.PREFILL, d=Role.DECODE, d2=Role.DECODE), n=2)
    says(core, "d", tokens(1, 21, choice=1, reason=LENGTH))
    core.handle(WorkerLost(incarnation=D), 3)
    commands = says(core, "d2", reserved(attempt=1))
    stop = Stop(key=key(attempt=1), choice=1, valid_tokens=2)
    assert commands[0] == Send(worker=D2, message=stop)
    assert core.state.requests["r"].spec.finished_choices == (1,)
    assert core.state.requests["r"].spec.resumed == ((10,), ())


def test_after_the_last_attempt_it_fails_with_the_reason() -> None:
    core = split()
    submit(core)
    says(core, "d", reserved())
    for attempt in range(MAX_ATTEMPTS - 1):
        says(core, "p", failed("transfer_failed", attempt=attempt))
        says(core, "d", reserved(attempt=attempt + 1))
    last = key(attempt=MAX_ATTEMPTS - 1)
    assert says(core, "p", failed("transfer_failed", attempt=last.attempt)) == [
        Send(worker=D, message=Abort(key=last)),
        Send(worker=P, message=Abort(key=last)),
        Fail(request_id="r", reason="transfer_failed", message="why"),
    ]
    says(core, "d", released(attempt=last.attempt))
    assert_no_books(core)


def test_a_grammar_that_can_not_be_followed_is_not_tried_elsewhere() -> None:
    core = split()
    submit(core)
    says(core, "d", reserved())
    assert says(core, "p", failed("grammar")) == [
        Send(worker=D, message=Abort(key=key())),
        Send(worker=P, message=Abort(key=key())),
        Fail(request_id="r", reason="grammar", message="why"),
    ]
    says(core, "d", released())
    assert_no_books(core)


def waiting(n: int = 1) -> RouterCore:
    """An admitted request whose decode worker was lost, and other routers have filled the rest."""
    core = running(split(), n=n)
    says(core, "p", running=4)
    assert core.handle(WorkerLost(incarnation=D), 3) == []
    return core


def test_an_admitted_request_waits_for_a_place_but_not_for_ever() -> None:
    core = waiting()
    assert says(core, "p", running=4, now_s=3 + FAILOVER_PATIENCE_S - 0.1) == []
    why = "can't go on: all 4 places of every decode worker are taken"
    assert says(core, "p", running=4, now_s=3 + FAILOVER_PATIENCE_S + 0.2) == [
        Fail(request_id="r", reason="slots_exhausted", message=why)
    ]
    assert_no_books(core)


def test_a_waiting_request_is_asked_for_again_but_not_at_every_message() -> None:
    core = waiting()
    asked = Reserve(spec=spec(attempt=1, emitted=(10,)), source=P, displaced=True)
    again = Send(worker=D2, message=asked)
    assert core.handle(WorkerJoined(hello=hello("d2", Role.DECODE)), 3.1) == [again]
    assert says(core, "p", now_s=4) == []  # it is being asked for
    assert says(core, "d2", refused("kv_exhausted", attempt=1), now_s=4) == []
    assert says(core, "p", now_s=4.1) == []
    assert says(core, "p", now_s=4 + ASK_AGAIN_S) == [again]
    (prefill,) = says(core, "d2", reserved(attempt=1), now_s=5)
    assert isinstance(prefill, Send) and isinstance(prefill.message, Prefill)
    assert "r" not in core.state.waiting


def test_a_waiting_request_can_be_stopped_and_aborted() -> None:
    core = waiting(n=2)
    assert core.handle(ChoiceStopped(request_id="r", choice=0, valid_tokens=1), 3) == []
    assert core.handle(Aborted(request_id="r"), 3) == []
    assert says(core, "p", running=4, now_s=9) == []
    assert_no_books(core)


def test_a_request_that_was_not_admitted_yet_is_refused() -> None:
    core = split()
    submit(core)
    says(core, "p", draining=True)
    refuse = core.handle(WorkerLost(incarnation=D), 3)[-1]
    assert isinstance(refuse, Refuse)
    assert refuse.refusal.reason == "worker_lost"
    assert_no_books(core)


def test_a_rejoined_worker_starts_with_empty_books() -> None:
    core = split()
    submit(core)
    says(core, "p", draining=True)
    core.handle(WorkerLost(incarnation=D), 3)
    assert says(core, "d", reserved()) == []
    core.handle(WorkerJoined(hello=hello("d", Role.DECODE)), 4)
    assert_no_books(core)
    assert core.handle(WorkerLost(incarnation=Incarnation("never seen")), 5) == []


def test_an_id_that_comes_again_gets_another_key() -> None:
    core = split()
    submit(core)
    core.handle(Aborted(request_id="r"), 2)
    (send,) = submit(core)
    assert send == Send(worker=D, message=Reserve(spec=spec(attempt=1), source=P))
    assert says(core, "d", reserved(), tokens(0, 99), released()) == []  # of its first life
    assert key(attempt=1) in core.state.workers[D].outlook
    assert core.state.workers[D].outlook.sequences == 1


def test_routers_number_their_attempts_from_where_they_are_told() -> None:
    core = RouterCore(RouterState(attempts=count(700)))
    core.handle(WorkerJoined(hello=hello("b", Role.BOTH)), 0)
    (send,) = core.handle(Submitted(request=request()), 1)
    assert isinstance(send, Send) and isinstance(send.message, Generate)
    assert send.message.spec.key == key(attempt=700)


def test_forecasts_count_what_asking_and_telling_the_workers_takes() -> None:
    """20 ms until the decode worker has answered, 50 more until the prompt is begun: a second
    request that allows less than these, and its prompt, is refused for good."""
    core = split()
    submit(core, "a", now_s=1)
    placed = core.state.requests["a"].predicted
    assert placed is not None and placed.prompt.messages_s == 0
    says(core, "d", reserved("a"), now_s=1.02)
    says(core, "p", tokens(0, 10, name="a"), now_s=1.07 + placed.prompt.prefill_s)
    objectives = Objectives(ttft_s=placed.prompt.prefill_s + 0.06)
    again = replace(request("b"), objectives=objectives)
    (refuse,) = core.handle(Submitted(request=again), 9)
    assert isinstance(refuse, Refuse) and refuse.refusal.hopeless
    submit(core, "c", now_s=9)
    predicted = core.state.requests["c"].predicted
    assert predicted is not None
    assert predicted.prompt.messages_s == pytest.approx(0.07)
    assert predicted.ttft_s == pytest.approx(placed.prompt.prefill_s + 0.07)


def test_a_prompt_of_which_no_token_is_wanted_is_done_with_its_prefill() -> None:
    """Its worker may not even know how long a decode step takes."""
    core = RouterCore()
    times = replace(STEP_TIMES, decode_knots=())
    worker = replace(hello("p", Role.PREFILL), step_times=times)
    core.handle(WorkerJoined(hello=worker), 0)
    core.handle(WorkerJoined(hello=hello("d", Role.DECODE)), 0)
    asked = replace(request(max_tokens=0), objectives=Objectives(deadline_s=1.0))
    (send,) = core.handle(Submitted(request=asked), 1)
    assert isinstance(send, Send) and isinstance(send.message, Prefill)
    predicted = core.state.requests["r"].predicted
    assert predicted is not None
    assert predicted.completes_in_s == predicted.prompt.first_token_s


def served(core: RouterCore, name: str, objective_s: float | None, *, late_s: float) -> bool:
    """Alone, with its first token so much later than its prompt takes; False: it is refused."""
    now_s = 10.0 * next(moments)
    asked = replace(request(name, max_tokens=1), objectives=Objectives(ttft_s=objective_s))
    core.handle(Submitted(request=asked), now_s)
    if name not in core.state.requests:
        return False
    placed, mine = core.state.requests[name].predicted, core.state.requests[name].key
    assert placed is not None
    says(core, "d", replace(reserved(), key=mine), now_s=now_s)
    now_s += placed.prompt.prefill_s + late_s
    says(core, "p", replace(tokens(0, 10, reason=LENGTH), key=mine), now_s=now_s)
    for worker in "pd":
        says(core, worker, replace(released(), key=mine), now_s=now_s)
    return True


def test_a_first_prompt_that_was_late_refuses_no_others_for_ever() -> None:
    core = split()
    assert served(core, "cold", None, late_s=5.0)
    assert served(core, "tried", 0.3, late_s=0.01)
    assert all(served(core, f"next {i}", 0.3, late_s=0.01) for i in range(5))


def test_one_late_prompt_among_others_refuses_none() -> None:
    core = split()
    for number, late_s in enumerate((0.01, 0.01, 5.0)):
        assert served(core, str(number), None, late_s=late_s)
    assert served(core, "next", 0.3, late_s=0.01)


class TestCachedTokens:
    """Of the prompt, as the first prefill that began has found them."""

    def started(self, tokens_found: int, attempt: int = 0) -> Lifetime:
        moment = lifetime("prefill_started", attempt=attempt)
        return replace(moment, tokens=tokens_found)

    @pytest.mark.parametrize("n", [1, 3])
    def test_the_first_worker_dies_before_it_begins(self, n: int) -> None:
        core = core_with(p=Role.PREFILL, p2=Role.PREFILL, d=Role.DECODE)
        submit(core, n=n)
        says(core, "d", reserved())
        first = core.state.requests["r"].workers[1]
        core.handle(WorkerLost(incarnation=first), 3)
        says(core, "d", reserved(attempt=1))
        assert core.state.requests["r"].cached_tokens == 0
        says(core, core.state.requests["r"].workers[1], self.started(2, attempt=1))
        assert core.state.requests["r"].cached_tokens == 2

    @pytest.mark.parametrize("n", [1, 3])
    def test_what_a_later_attempt_finds_does_not_count(self, n: int) -> None:
        core = core_with(p=Role.PREFILL, d=Role.DECODE, d2=Role.DECODE)
        submit(core, n=n)
        says(core, "d", reserved())
        says(core, "p", self.started(1), *(tokens(0, 10, choice=c) for c in range(n)))
        core.handle(WorkerLost(incarnation=D), 3)
        says(core, "d2", reserved(attempt=1))
        says(core, "p", self.started(3, attempt=1))
        assert core.state.requests["r"].cached_tokens == 1

    def test_emitted_tokens_are_none_of_the_prompt(self) -> None:
        core = running(core_with(p=Role.PREFILL, d=Role.DECODE, d2=Role.DECODE))
        core.handle(WorkerLost(incarnation=D), 3)
        says(core, "d2", reserved(attempt=1))
        says(core, "p", self.started(4, attempt=1))
        assert core.state.requests["r"].cached_tokens == 3
