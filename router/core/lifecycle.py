"""The life of a request in a router: one function for each transition, in their order. Pure.

    submit           (new) -> SEEKING
    seek             SEEKING -> ASKED (`ask`), WAITING (`wait`) or GONE (`reject`, `fail`)
    retry_waiting    WAITING -> SEEKING   it is its turn to ask again
    ask_next         ASKED -> SEEKING     its decode worker has no slot for it
    take_slot        ASKED -> QUEUED, or PREFILLING (`send_prompt`)
    send_prompt      ASKED, QUEUED -> PREFILLING
    place_elsewhere  QUEUED, PREFILLING -> SEEKING   a worker of it takes nothing more
    start_decoding   PREFILLING -> DECODING
    go_on_at         DECODING -> PREFILLING  another decode worker takes it
    finish           DECODING -> GONE
    fail_attempt     any -> SEEKING or GONE  one of its workers has failed it, or has died
    isolate          any -> HELD             it may have killed a worker
    let_go           HELD -> SEEKING         it is its turn
    abort            any -> GONE             also `stop_choice` of its last choice, `miss_deadline`

`leave` undoes whatever a request holds; `end_attempt` what its attempt holds. A request that goes
on elsewhere goes on behind the tokens that were delivered: random draws are counter based.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from kvrelay.errors import FailureReason
from kvrelay.messages import LifetimeMoment, Tokens
from router.core.decision import decide, demand_of, failover_patience_s, line_of
from router.core.events import (
    Admit,
    ChoiceStopped,
    Command,
    Deliver,
    Fail,
    Refuse,
    abort_attempt,
    ask_for_slot,
    ask_to_reserve,
    prefill,
    stop_decoding,
    stop_idle_decode,
)
from router.core.learning import learn_length, learn_offered, learn_pace, learn_ttft, was_offered
from router.core.policy.admission import Admitted, Deferred
from router.core.promises.refusal import NO_CAPACITY, Refusal
from router.core.request import Ledger, Request, RequestState
from router.core.router_state import Move, RouterState
from router.core.state.candidate import Candidate
from router.core.state.demand import Demand
from router.core.state.generation import GenerationRequest
from router.core.state.story import Moment, choice_end, held, plain, why
from router.core.state.worker_view import WorkerView
from router.core.workers import book_decode, book_prefill


def submit(state: RouterState, submitted: GenerationRequest, now_s: float) -> list[Command]:
    assert submitted.request_id not in state.requests, f"{submitted.request_id} runs already"
    request = Request(
        submitted=submitted,
        tier=state.tiers[submitted.qos_tier],
        ledger=Ledger(before_s=submitted.phases_s, submitted_s=now_s),
        attempt=next(state.attempts),
    )
    if not submitted.is_ahead:
        request.promise = state.promises.claim(request.digest, now_s, submitted.promise)
    if request.promise is None and submitted.promise is not None:
        request.early = state.promises.early(submitted.promise, now_s)
    known = request.admitted or request.promise or request.digest in state.returning
    request.is_counted = bool(known or submitted.promise) and was_offered(state, request, now_s)
    state.requests[request.request_id] = request
    told = [_admit(state, request, now_s)] if request.admitted else []
    return [*told, *seek(state, request, NO_CAPACITY, now_s)]


# --- seeking --------------------------------------------------------------------------------------


def seek(state: RouterState, request: Request, otherwise: Refusal, now_s: float) -> list[Command]:
    """Asks the next decode worker. Without any left, `otherwise` says why."""
    if not request.admitted:
        request.capped_tokens = None
    demand, verdict = decide(state, request, otherwise, now_s)
    if not request.is_counted:
        learn_offered(state, request, demand, verdict)
    match verdict:
        case Admitted():
            return ask(state, request, demand, verdict, now_s)
        case Deferred(refusal=refusal, patience_s=patience_s):
            return wait(state, request, demand, refusal, patience_s, now_s)
        case Refusal() if request.admitted:
            patience_s = failover_patience_s(state, request, now_s)
            return wait(state, request, demand, verdict, patience_s, now_s)
        case Refusal():
            return reject(state, request, verdict, now_s)


def ask(
    state: RouterState, request: Request, demand: Demand, admitted: Admitted, now_s: float
) -> list[Command]:
    request.enter(RequestState.ASKED)
    if not request.admitted:
        request.cap(demand.spec.sampling.max_tokens)
    if admitted.doubted:
        admitted.note_trial(now_s)
    candidate, prompt = admitted.candidate, admitted.prediction.prompt
    request.place(admitted, now_s)
    book_decode(demand, admitted, now_s)
    if state.dispatch.expect(request, demand, admitted):
        request.prefill_worker = None
        request.story.note(Moment.ASKED, now_s, request.worker_names[-1:])
        return [ask_to_reserve(state.workers, demand, candidate.decode, None, admitted.counted)]
    book_prefill(demand, candidate.prefiller, prompt, now_s)
    request.story.note(Moment.ASKED, now_s, request.worker_names)
    return [ask_for_slot(state.workers, demand, admitted, request.within_s(now_s))]


def wait(
    state: RouterState,
    request: Request,
    demand: Demand,
    refusal: Refusal,
    patience_s: float,
    now_s: float,
    held_s: float = 0.0,
) -> list[Command]:
    """Without any worker a request that was not admitted has nothing to wait for. It is not tried
    before `held_s`."""
    line = line_of(state, request, demand)
    waits = (request.admitted or state.workers) and state.waiting.try_wait(
        request.request_id,
        line,
        refusal,
        patience_s,
        now_s,
        held_s=held_s,
        places=demand.choices,
    )
    if waits:
        request.enter(RequestState.WAITING)
        if not held_s:
            request.story.note(Moment.WAITS, now_s, (), why(refusal.reason, refusal.message))
        return []
    if not request.admitted:
        return reject(state, request, refusal, now_s)
    return fail(state, request, refusal.reason, f"can't go on: {refusal.message}", now_s)


def workers_changed(state: RouterState, now_s: float) -> None:
    """One has come or gone: those who wait may be tried at once."""
    waiting = [state.requests[request_id] for request_id in state.waiting]
    for request in filter(lambda one: one.admitted, waiting):
        demand = demand_of(state, request, request.spec, now_s)
        state.waiting.move(request.request_id, line_of(state, request, demand))
    state.waiting.wake_all(now_s)


def retry_waiting(state: RouterState, now_s: float) -> list[Command]:
    """All whose turn it is. A request that is refused again waits on, and its line with it."""
    commands: list[Command] = []
    while (turn := state.waiting.take_next(now_s)) is not None:
        request_id, refusal = turn
        request = state.requests[request_id]
        request.enter(RequestState.SEEKING)
        request.tried.clear()
        commands += seek(state, request, refusal, now_s)
        state.waiting.follow(request_id, now_s)
    return commands


def reject(state: RouterState, request: Request, refusal: Refusal, now_s: float) -> list[Command]:
    told = rejection_for(state, request, refusal, now_s)
    request.story.note(Moment.REFUSED, now_s, (), why(told.reason, told.message))
    state.returning.refused(request.digest, now_s)
    leave(state, request, now_s)
    return [Refuse(request_id=request.request_id, refusal=told)]


def rejection_for(state: RouterState, request: Request, refusal: Refusal, now_s: float) -> Refusal:
    """With the time to come back at, as a promise where one can be given. Who comes before its time
    is told the same again."""
    early = request.early
    if early is not None and now_s < early.due_s and not refusal.hopeless:
        promise = early.told(now_s)
        return replace(refusal, retry_after_s=promise.due_in_s, promise=promise)
    again = request.promise is not None
    if again:
        state.promises.settle(kept=False)
        request.promise = None
    soonest_s = refusal.retry_after_s
    if (soonest_s is None or not isfinite(soonest_s)) and not refusal.hopeless:
        soonest_s = state.releases.retry_after_s()
        refusal = replace(refusal, retry_after_s=soonest_s)
    if refusal.work is None or soonest_s is None or not isfinite(refusal.work.prefill_s):
        return refusal
    if request.submitted.is_ahead:
        return refusal
    promise = state.promises.make(
        request.digest,
        refusal.work,
        soonest_s,
        now_s,
        request.tier.priority,
        again=again,
        all_by_own=state.workers.all_by_own(),
    )
    return replace(refusal, retry_after_s=promise.due_in_s, promise=promise)


# --- asked ----------------------------------------------------------------------------------------


def ask_next(state: RouterState, request: Request, refusal: Refusal, now_s: float) -> list[Command]:
    """Its decode worker has said no and holds nothing; its prefill worker was not told yet."""
    request.story.note(Moment.TURNED_DOWN, now_s, request.worker_names[-1:], plain(refusal.reason))
    end_attempt(state, request, now_s, freed=True)
    request.placed = None
    request.enter(RequestState.SEEKING)
    return seek(state, request, refusal, now_s)


def take_slot(
    state: RouterState, request: Request, held_tokens: int, now_s: float
) -> list[Command]:
    """Its decode worker has a slot for it. The client is told once that it is admitted."""
    assert request.placed is not None, f"{request.key} has a slot that nobody asked for"
    candidate = request.placed.candidate
    request.ledger.mark(LifetimeMoment.RESERVED, now_s)
    there = held(held_tokens) if held_tokens else ""
    request.story.note(Moment.RESERVED, now_s, request.worker_names[-1:], there)
    request.reserved_s = now_s
    if candidate.prefill is not None:
        candidate.decode.reserving.observe(now_s - request.placed_s, now_s)
    state.waiting.leave(request.request_id)
    state.local_prefills += request.ledger.is_local
    commands: list[Command] = [] if request.admitted else [_admit(state, request, now_s)]
    if state.dispatch.keep(request, held_tokens, now_s):
        request.enter(RequestState.QUEUED)
        request.story.note(Moment.QUEUED, now_s, (), f"{state.dispatch.waiting} at the router")
        return commands
    return commands + send_prompt(request, candidate, held_tokens, now_s)


def _admit(state: RouterState, request: Request, now_s: float) -> Admit:
    request.admitted = True
    if request.digest in state.returning:
        state.returning.admitted(request.digest, request.request_id)
    if not request.submitted.is_ahead:
        state.forecast.prompts.saw(len(request.submitted.prompt_ids))
    if request.promise is not None:
        state.promises.settle(kept=True)
        request.promise = None
    elif request.early is not None:
        state.promises.served_early(request.early, now_s)
        request.early = None
    return Admit(request_id=request.request_id)


def send_prompt(
    request: Request, candidate: Candidate, held_tokens: int, now_s: float
) -> list[Command]:
    request.enter(RequestState.PREFILLING)
    if candidate.prefill is not None:
        request.story.note(Moment.SENT_TO_PREFILL, now_s, request.worker_names)
    return prefill(request, candidate, held_tokens, request.within_s(now_s))


# --- running --------------------------------------------------------------------------------------


def place_elsewhere(
    state: RouterState, request: Request, refusal: Refusal, now_s: float
) -> list[Command]:
    """A worker of it takes nothing more. That is no failure."""
    request.story.note(Moment.TRIED_AGAIN, now_s, request.worker_names, refusal.message)
    aborts = abort_attempt(request, state.workers)
    end_attempt(state, request, now_s, freed=True)
    request.begin_attempt(next(state.attempts))
    request.enter(RequestState.SEEKING)
    return aborts + seek(state, request, refusal, now_s)


def deliver(
    state: RouterState, request: Request, view: WorkerView, event: Tokens, now_s: float
) -> list[Command]:
    """Tokens go to the client in order, each once."""
    view.outlook.grown(event.key, event.first_index + len(event.token_ids))
    if event.first_index == request.choices[event.choice].resumed:
        request.story.note(Moment.FIRST_TOKEN, event.at_s, (view.hello.name,))
        start_decoding(state, request, event, now_s)
    request.ledger.mark(LifetimeMoment.LAST_TOKEN, event.at_s)
    request.ledger.mark(LifetimeMoment.LAST_TOKEN_RECEIVED, now_s)
    ready = request.take(event)
    if not ready:
        return []
    if state.suspects.cases or state.suspects.killed:
        trust(state, request, now_s)
    if event.finish_reason is not None:
        learn_length(state, request, event)
        if len(request.choices) > 1:
            end = choice_end(event.choice, event.finish_reason)
            request.story.note(Moment.CHOICE_DONE, now_s, request.worker_names[-1:], end)
    done = request.done
    delivery = Deliver(request_id=request.request_id, tokens=tuple(ready), done=done)
    if not done:
        return [delivery]
    stops = stop_idle_decode(request, view.incarnation, state.workers)
    finish(state, request, now_s)
    return [delivery, *stops]


def trust(state: RouterState, request: Request, now_s: float) -> None:
    """It may have killed a worker, but has yielded tokens since."""
    if state.suspects.yielded(request.request_id, request.new_tokens):
        request.story.note(Moment.CLEARED, now_s, (), f"{request.new_tokens} tokens alone")
        request.alone = False


def start_decoding(state: RouterState, request: Request, event: Tokens, now_s: float) -> None:
    """The first token of a choice has come, so its prompt is ahead of no other any more."""
    if request.state is not RequestState.DECODING:
        request.enter(RequestState.DECODING)
    request.ledger.mark(LifetimeMoment.FIRST_TOKEN, event.at_s)
    request.ledger.mark(LifetimeMoment.FIRST_TOKEN_RECEIVED, now_s)
    for worker in request.workers:
        if (view := state.workers.get(worker)) is not None:
            view.queue.remove(request.key, now_s)
    learn_ttft(state, request, now_s)


def go_on_at(
    state: RouterState,
    request: Request,
    move: Move,
    held_tokens: int,
    now_s: float,
) -> list[Command]:
    """The target has a slot for it, which was booked when it was asked. The worker that it leaves
    ends the attempt and prefills the new one: it is never without both, and so does not stop."""
    left = request.attempt
    end_attempt(state, request, now_s, freed=True)
    request.enter(RequestState.PREFILLING)
    since = request.move(move.spec, led_away=move.led_away)
    request.place(move.admitted, now_s)
    cause = "its worker drains" if move.led_away else "its worker would overflow"
    request.story.note(Moment.MOVED, now_s, request.worker_names, cause)
    candidate = move.admitted.candidate
    return prefill(request, candidate, held_tokens, None, leaves=left, since=since)


# --- ends -----------------------------------------------------------------------------------------


def finish(state: RouterState, request: Request, now_s: float) -> None:
    """Its last token has come."""
    learn_pace(state, request, now_s)
    request.story.note(Moment.DONE, now_s, request.worker_names[-1:], request.outcome)
    leave(state, request, now_s)
    state.releases.released(now_s)


def fail_attempt(
    state: RouterState,
    request: Request,
    reason: str,
    message: str,
    now_s: float,
    *,
    by_death: bool = False,
    held_s: float = 0.0,
) -> list[Command]:
    """Runs it again elsewhere, unless it has failed too often. `by_death`: a worker of it has died.
    Until `held_s` it waits to be told how."""
    aborts = abort_attempt(request, state.workers)
    if request.is_spent(by_death=by_death or reason == FailureReason.PEER_LOST):
        return aborts + fail(state, request, reason, message, now_s)
    state.suspects.left(request.key, request.workers, now_s)
    end_attempt(state, request, now_s, freed=True)
    cause = f"{why(reason, message)}; {request.outcome} so far"
    request.story.note(Moment.TRIED_AGAIN, now_s, request.worker_names, cause)
    request.try_again(next(state.attempts))
    request.enter(RequestState.SEEKING)
    refusal = Refusal(reason=reason, message=message)
    if not held_s:
        return aborts + seek(state, request, refusal, now_s)
    demand = demand_of(state, request, request.spec, now_s)
    patience_s = failover_patience_s(state, request, now_s)
    return aborts + wait(state, request, demand, refusal, patience_s, now_s, held_s)


def isolate(state: RouterState, request: Request, now_s: float, reason: str) -> list[Command]:
    """Wherever it is by now. It was in a step, so a worker had admitted it, also if that was not
    heard."""
    if request.state is RequestState.HELD:
        return []
    told = [] if request.admitted else [_admit(state, request, now_s)]
    aborts = abort_attempt(request, state.workers)
    end_attempt(state, request, now_s, freed=True)
    state.waiting.leave(request.request_id)
    if request.state is not RequestState.WAITING:
        request.try_again(next(state.attempts))
    request.enter(RequestState.SEEKING)
    request.enter(RequestState.HELD)
    request.alone = True
    request.story.note(Moment.SUSPECTED, now_s, (), reason)
    return [*told, *aborts]


def let_go(state: RouterState, request: Request, now_s: float) -> list[Command]:
    if request.alone:
        request.story.note(Moment.RUNS_ALONE, now_s)
    request.enter(RequestState.SEEKING)
    request.tried.clear()
    return seek(state, request, NO_CAPACITY, now_s)


def fail(
    state: RouterState, request: Request, reason: str, message: str, now_s: float
) -> list[Command]:
    request.story.note(Moment.FAILED, now_s, request.worker_names, why(reason, message))
    leave(state, request, now_s)
    return [Fail(request_id=request.request_id, reason=reason, message=message)]


def stop_choice(state: RouterState, event: ChoiceStopped, now_s: float) -> list[Command]:
    request = state.requests.get(event.request_id)
    if request is None or request.choices[event.choice].finished:
        return []
    request.choices[event.choice].finished = True
    if request.done:
        request.story.note(Moment.DONE, now_s, request.worker_names[-1:], request.outcome)
        return _end(state, request, now_s)
    request.story.note(Moment.CHOICE_DONE, now_s, (), choice_end(event.choice, "stop string"))
    if request.placed is None:
        return []  # the next worker is told once it has taken the request
    decode = request.placed.candidate.decode.incarnation
    return [stop_decoding(request, decode, event.choice, event.valid_tokens)]


def abort(state: RouterState, request_id: str, now_s: float) -> list[Command]:
    request = state.requests.get(request_id)
    if request is None:
        return []
    request.story.note(Moment.ABORTED, now_s, request.worker_names, "by its client")
    return _end(state, request, now_s)


def _end(state: RouterState, request: Request, now_s: float) -> list[Command]:
    """While workers still run it."""
    aborts = abort_attempt(request, state.workers)
    leave(state, request, now_s)
    state.releases.released(now_s)
    return aborts


def miss_deadline(state: RouterState, request_id: str, now_s: float) -> list[Command]:
    request = state.requests.get(request_id)
    if request is None:
        return []
    deadline_s = request.objectives.deadline_s or 0.0
    message = f"its deadline of {deadline_s:.3f} s has passed"
    failure = Fail(request_id=request_id, reason=FailureReason.DEADLINE_EXCEEDED, message=message)
    request.story.note(Moment.FAILED, now_s, request.worker_names, message)
    return [*_end(state, request, now_s), failure]


def leave(state: RouterState, request: Request, now_s: float) -> None:
    """any -> GONE: undoes whatever the request holds in its state. Slots stay taken until their
    workers say Released. A pending move stays until its target answers."""
    request.enter(RequestState.GONE)
    state.stories.keep(request.story)
    del state.requests[request.request_id]
    state.waiting.leave(request.request_id)
    if state.suspects.cases or state.suspects.killed:
        state.suspects.forget(request.request_id)
    if request.promise is not None:
        state.promises.give_up()
        request.promise = None
    end_attempt(state, request, now_s, freed=False)


def end_attempt(state: RouterState, request: Request, now_s: float, *, freed: bool) -> None:
    """Its prompt waits nowhere any more. `freed`: its slots count as free at once, since it takes
    others; otherwise when their workers say Released. A prefill worker that has handed over always
    says so itself."""
    key, needed = request.key, request.workers
    if not needed:
        return
    state.dispatch.forget(key)
    for worker in (needed[0], request.prefill_worker):
        view = None if worker is None else state.workers.get(worker)
        if view is None:
            continue
        if worker in needed:
            view.queue.remove(key, now_s)
            if freed:
                view.outlook.remove(key)
        view.await_release(key)
