"""A router's core: it hears events and says what is to be done. Pure; one per router.

`router.core.lifecycle` has what happens to a request; here is which event leads to what.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.counters import Counters
from kvrelay.errors import FailureReason
from kvrelay.messages import (
    Lifetime,
    LifetimeMoment,
    PromptLogprobs,
    Released,
    RequestFailed,
    Reserved,
    ReserveRefused,
    Suspect,
    Tokens,
    WorkerEvent,
)
from kvrelay.types import Incarnation, RequestSpec, Role
from router.core import learning, lifecycle
from router.core.events import (
    Aborted,
    ChoiceStopped,
    Command,
    DeadlinePassed,
    Event,
    LadderStepped,
    PoolNodeLost,
    PoolNodeSaid,
    Rejected,
    Send,
    Submitted,
    TimePassed,
    WorkerEnded,
    WorkerJoined,
    WorkerLost,
    WorkerSaid,
    WorkerSuspected,
    abort_attempt,
    preload,
)
from router.core.faults.poison import END_TOLD_S, PEER_END_S, Ending, Standing
from router.core.migration import lead_away
from router.core.promises.refusal import DRAINING, NO_CAPACITY, refused_by_worker
from router.core.request import Request, RequestState
from router.core.router_state import RouterState
from router.core.state.story import Moment
from router.core.state.worker_view import WorkerView


class RouterCore:
    def __init__(
        self, state: RouterState | None = None, *, preloads: tuple[RequestSpec, ...] = ()
    ) -> None:
        """Each worker that joins computes the prompts of `preloads`."""
        self.state = RouterState() if state is None else state
        self.preloads = preloads

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Raises Rejected for what a worker should not have said, PeerError for an update of a pool
        node that another should have come before."""
        state = self.state
        commands = self._handle(event, now_s)
        if state.suspects.cases:
            commands += self._give_turns(now_s)
        if state.waiting:
            commands += lifecycle.retry_waiting(state, now_s)
        if state.dispatch.waiting:
            commands += state.dispatch.give(state, now_s)
        if now_s >= state.ladders.next_look_s:
            commands += self._step_ladders(now_s)
        return commands

    def _step_ladders(self, now_s: float) -> list[Command]:
        return [
            LadderStepped(tier=ladder.tier.name, step=ladder.step, cause=cause)
            for ladder, cause in self.state.ladders.climb(now_s)
        ]

    def _handle(self, event: Event, now_s: float) -> list[Command]:
        state = self.state
        match event:
            case WorkerSaid():
                return self._on_report(event, now_s)
            case Submitted(request=submitted):
                return lifecycle.submit(state, submitted, now_s)
            case ChoiceStopped():
                return lifecycle.stop_choice(state, event, now_s)
            case Aborted(request_id=request_id):
                return lifecycle.abort(state, request_id, now_s)
            case DeadlinePassed(request_id=request_id):
                return lifecycle.miss_deadline(state, request_id, now_s)
            case WorkerJoined(hello=hello):
                state.workers.join(hello)
                if hello.role is not Role.DECODE:
                    state.prefilled.join(hello.pool)
                lifecycle.workers_changed(state, now_s)
                return preload(hello, hello.role, self.preloads)
            case WorkerSuspected(incarnation=incarnation):
                if (view := state.workers.get(incarnation)) is not None:
                    view.suspect = True
                return []
            case WorkerLost():
                return self._on_worker_lost(event, now_s)
            case WorkerEnded(incarnation=incarnation, ending=ending):
                return self._on_worker_ended(incarnation, ending, now_s)
            case TimePassed():
                return []
            case PoolNodeSaid(update=update):
                state.directory.updated(update)
                return []
            case PoolNodeLost(node=node):
                state.directory.lost(node)
                return []

    # --- workers --------------------------------------------------------------------------------

    def _on_report(self, said: WorkerSaid, now_s: float) -> list[Command]:
        state = self.state
        view = state.workers.get(said.incarnation)
        if view is None:
            return []
        running_before = view.counters.running
        view.said(said.counters)
        flips = said.counters.role_epoch > view.role_epoch
        commands = self._flip(view, said.counters, now_s) if flips else []
        for changes in said.blocks:
            state.directory.changed(said.incarnation, changes)
        commands += self._on_events(view, said.events, now_s)
        if not view.prefills and (
            said.counters.running < running_before
            or any(isinstance(event, Released) for event in said.events)
        ):
            state.waiting.wake(now_s)
        if state.moves.hot_spots or view.draining:
            commands += state.moves.relieve(state, view, now_s)
        return commands + lead_away(state, view, now_s) if view.draining else commands

    def _flip(self, view: WorkerView, counters: Counters, now_s: float) -> list[Command]:
        """Another role: what it has already been sent is served. Prompts that no worker would take
        from the shared queue any more are placed anew."""
        state = self.state
        assert counters.role is not None
        state.workers.take_role(view, counters.role, counters.role_epoch)
        lifecycle.workers_changed(state, now_s)
        stranded = state.dispatch.stranded(state, now_s) if state.dispatch.waiting else []
        return [
            *preload(view.hello, view.own_role, self.preloads),
            *(
                command
                for request in stranded
                for command in lifecycle.place_elsewhere(state, request, NO_CAPACITY, now_s)
            ),
        ]

    def _on_events(
        self, view: WorkerView, events: Iterable[WorkerEvent], now_s: float
    ) -> list[Command]:
        """Raises Rejected."""
        commands: list[Command] = []
        for event in events:
            try:
                commands += self._on_event(view, event, now_s)
            except Exception as error:
                raise Rejected(event, error, commands) from error
        return commands

    def _on_event(self, view: WorkerView, event: WorkerEvent, now_s: float) -> list[Command]:
        """An event of an earlier attempt, or of a worker that the attempt needs no more, changes
        only what is known of the worker."""
        state = self.state
        if isinstance(event, Released | ReserveRefused):
            view.give_back(event.key, now_s)
            if isinstance(event, ReserveRefused):
                view.draining |= event.reason == DRAINING.reason
        if event.key in state.moves.pending:
            return state.moves.answered(state, event, now_s)
        request = state.requests.get(event.key.request_id)
        if request is None or request.key != event.key or view.incarnation not in request.workers:
            return []
        return self._on_event_of(request, view, event, now_s)

    def _on_event_of(
        self, request: Request, view: WorkerView, event: WorkerEvent, now_s: float
    ) -> list[Command]:
        state = self.state
        match event:
            case Tokens():
                return lifecycle.deliver(state, request, view, event, now_s)
            case Lifetime():
                return self._on_lifetime(request, view, event, now_s)
            case Reserved(held_tokens=held_tokens):
                return lifecycle.take_slot(state, request, held_tokens, now_s)
            case ReserveRefused(reason=reason):
                asked = request.workers[0] == view.incarnation
                go_on = lifecycle.ask_next if asked else lifecycle.place_elsewhere
                return go_on(state, request, refused_by_worker(reason), now_s)
            case PromptLogprobs():
                request.add_prompt_logprobs(event)
                return []
            case RequestFailed(reason=FailureReason.GRAMMAR as reason, message=message):
                aborts = abort_attempt(request, state.workers)
                return aborts + lifecycle.fail(state, request, reason, message, now_s)
            case RequestFailed(reason=reason, message=message):
                suspected = learning.suspect(state, request, event, now_s)
                held_s = now_s + PEER_END_S if reason == FailureReason.PEER_LOST else 0.0
                return suspected + lifecycle.fail_attempt(
                    state, request, reason, message, now_s, held_s=held_s
                )
            case Released():
                # its prefill worker was told that all is there, and may end before that is heard
                request.committed |= view.incarnation == request.prefill_worker
                return []

    def _on_lifetime(
        self, request: Request, view: WorkerView, moment: Lifetime, now_s: float
    ) -> list[Command]:
        request.on_lifetime(moment)
        if moment.name == LifetimeMoment.PREFILL_STARTED:
            self._count_prefill(request, view, moment.tokens)
        view.queue.on_lifetime(moment)
        if moment.name == LifetimeMoment.HANDOFF_COMMITTED:
            self.state.recent_pairs.used(request.links(), now_s)
        if moment.name in learning.SHOWS_A_GOOD_LINK:
            return learning.trust(self.state, request, moment)
        return []

    def _count_prefill(self, request: Request, view: WorkerView, cached: int) -> None:
        if request.placed is not None and request.placed.candidate.computes_prompt:
            tokens = len(request.submitted.prompt_ids) + len(request.emitted_ids)
            self.state.prefilled.began(view.hello.pool, tokens - cached)

    def _on_worker_lost(self, event: WorkerLost, now_s: float) -> list[Command]:
        state, incarnation = self.state, event.incarnation
        view = state.workers.leave(incarnation)
        state.directory.lost(incarnation)
        if view is None:
            return []
        state.quarantine.forget(incarnation)
        state.recent_pairs.forget(incarnation)
        state.moves.lost(state, incarnation, now_s)
        affected = [one for one in state.requests.values() if incarnation in one.workers]
        affected += state.dispatch.stranded(state, now_s) if view.prefills else []
        affected.sort(key=lambda one: (not one.admitted, one.tier.priority))
        lifecycle.workers_changed(state, now_s)
        commands = self._fail_over(affected, event, f"worker {view.hello.name} was lost", now_s)
        return commands + self._suspicions(incarnation) if event.was_silent else commands

    def _fail_over(
        self, affected: Iterable[Request], event: WorkerLost, message: str, now_s: float
    ) -> list[Command]:
        """They wait until it is known how the worker ended, if that is asked."""
        state, reason, held_s = self.state, FailureReason.WORKER_LOST, 0.0
        if event.asked:
            held_s = now_s + END_TOLD_S
            keys = [one.key for one in affected]
            state.waiting.hold(state.suspects.await_end(event.incarnation, keys, now_s), held_s)
        by_death = not event.was_rejected
        commands: list[Command] = []
        for request in affected:
            commands += lifecycle.fail_attempt(
                state, request, reason, message, now_s, by_death=by_death, held_s=held_s
            )
        return commands

    # --- requests that kill workers -------------------------------------------------------------

    def _on_worker_ended(self, worker: Incarnation, ending: Ending, now_s: float) -> list[Command]:
        state = self.state
        judged = state.suspects.judge(worker, ending, state.requests)
        commands: list[Command] = []
        for name in judged.suspects:
            commands += lifecycle.isolate(state, state.requests[name], now_s, _suspicion(ending))
        for name in judged.cleared:
            state.requests[name].alone = False
            state.requests[name].story.note(Moment.CLEARED, now_s, (), "another one is to blame")
        if judged.convicted is not None:
            commands += self._refuse_poison(state.requests[judged.convicted], ending, now_s)
        state.waiting.release(judged.released, now_s)
        return commands

    def _refuse_poison(self, request: Request, ending: Ending, now_s: float) -> list[Command]:
        state = self.state
        aborts = abort_attempt(request, state.workers)
        message = f"this request kills workers: it is not tried again ({ending.why or 'killed'})"
        return aborts + lifecycle.fail(state, request, FailureReason.POISON, message, now_s)

    def _give_turns(self, now_s: float) -> list[Command]:
        """Suspects run one at a time; those that were cleared come back a few at a time."""
        state = self.state
        tried = [state.requests[name] for name in state.suspects.of(Standing.TRIED)]
        stuck = all(one.state is RequestState.WAITING for one in tried)
        turns = state.suspects.take_turns(len(state.requests), now_s, stuck=stuck)
        commands: list[Command] = []
        for name in turns:
            commands += lifecycle.let_go(state, state.requests[name], now_s)
        return commands

    def _suspicions(self, silent: Incarnation) -> list[Command]:
        """Its peers drop their connections to it: it may write to them when it wakes up. They hear
        first which of its requests are over."""
        message = Suspect(incarnation=silent)
        return [Send(worker=one, message=message) for one in self.state.workers]

    def validate(self) -> None:
        self.state.validate()


def _suspicion(ending: Ending) -> str:
    requests = len({*ending.step})
    beside = "" if requests == 1 else f", with {requests - 1} other requests"
    return f"it was in the last step of a worker{beside}: {ending.why or 'killed'}"
