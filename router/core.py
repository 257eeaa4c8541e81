"""Follows every request from submission to its last token. Pure; one per router.

    submitted -> reserving -> (Reserved) admitted -> tokens ... -> finished
                    `-> (ReserveRefused) next decode worker, or refused

A request whose worker fails goes on elsewhere under the next attempt, behind the tokens delivered;
draws are counter based. One of several choices is run again: it yields the same tokens, and those
already delivered are dropped by their index.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from itertools import count
from math import inf

from kvrelay.messages import (
    Abort,
    Lifetime,
    Released,
    RequestFailed,
    Reserved,
    ReserveRefused,
    Tokens,
    WorkerEvent,
)
from kvrelay.qos import ONE_TIER, QosTiers
from kvrelay.types import FinishReason, Incarnation, RequestSpec
from router import orders
from router.admitting.capacity import Capacity
from router.admitting.policy import AdmissionPolicy, Admitted, Deferred, Verdict
from router.admitting.predictive import Predictive
from router.candidate import Candidate
from router.degrading import deferred, less_output_helps, stricter, tripped, ways
from router.demand import Demand
from router.directory import Directory
from router.events import (
    Aborted,
    Admit,
    ChoiceStopped,
    Command,
    DeadlinePassed,
    Deliver,
    Event,
    Fail,
    LadderStepped,
    PairQuarantined,
    PairTrusted,
    Refuse,
    Send,
    Submitted,
    WorkerJoined,
    WorkerLost,
    WorkerSaid,
)
from router.forecast.forecast import Forecast
from router.generation import GenerationRequest
from router.ladder import Ladders, Step
from router.latency.margins import Margin
from router.latency.output_lengths import OutputLengths
from router.ledger import Ledger
from router.moving import Moving
from router.placing.kv_aware import KvAware
from router.placing.policy import PlacementPolicy
from router.prefixes import HeldPrefixes
from router.promises import NOTHING_PROMISED, Promised, Promises, digest_of
from router.quarantine import SUSPICIOUS, Quarantine
from router.refusal import DRAINING, NO_CAPACITY, Refusal, refused_by_worker
from router.release_clock import ReleaseClock
from router.request import Request
from router.view import WorkerView
from router.waiting import PATIENCE_S, WaitingRoom
from router.workers import Workers

MAX_ATTEMPTS = 3
CONFIDENCE = 0.95
"""The share of admitted requests that are to keep their objectives."""
EXPECTED = 0.5
"""The quantile of its tier's output lengths that a request is expected to have."""
SOON_S = 0.5
"""Who is to come back later than this finds the worker done with whoever is taken now."""


@dataclass(slots=True)
class RouterCore:
    """`attempts` numbers the tries of all requests: a request id may come again, or at another
    router, while a worker still holds the earlier one, so routers start at different numbers."""

    attempts: Iterator[int] = field(default_factory=count)
    preloads: tuple[RequestSpec, ...] = ()
    placing: PlacementPolicy = field(default_factory=KvAware)
    admitting: AdmissionPolicy = field(default_factory=Predictive)
    tiers: QosTiers = ONE_TIER
    move_hot_spots: InitVar[bool] = False
    lengths: OutputLengths = field(default_factory=OutputLengths)
    promises: Promises = field(default_factory=Promises)
    forecast: Forecast = field(init=False)
    moving: Moving = field(init=False)
    ladders: Ladders = field(init=False)
    workers: Workers = field(default_factory=Workers)
    requests: dict[str, Request] = field(default_factory=dict)
    directory: Directory = field(default_factory=Directory)
    waiting: WaitingRoom = field(default_factory=WaitingRoom)
    quarantine: Quarantine = field(default_factory=Quarantine)
    _releases: ReleaseClock = field(default_factory=ReleaseClock)

    def __post_init__(self, move_hot_spots: bool) -> None:
        self.moving = Moving(self.workers, self.requests, self.lengths, enabled=move_hot_spots)
        self.ladders = Ladders(self.tiers)
        each = (1 + CONFIDENCE) / 2  # of two objectives
        self.forecast = Forecast(
            self.workers, ttft=Margin(confidence=each), tpot=Margin(confidence=each)
        )

    def handle(self, event: Event, now_s: float) -> list[Command]:
        return [*self._handle(event, now_s), *self._ask_again(now_s), *self._climb(now_s)]

    def _handle(self, event: Event, now_s: float) -> list[Command]:
        match event:
            case WorkerSaid():
                return self._worker_said(event, now_s)
            case Submitted(request=submitted):
                return self._submitted(submitted, now_s)
            case ChoiceStopped():
                return self._stopped(event, now_s)
            case Aborted(request_id=request_id):
                return self._aborted(request_id, now_s)
            case DeadlinePassed(request_id=request_id):
                return self._too_late(request_id, now_s)
            case WorkerJoined(hello=hello):
                self.workers.join(hello)
                return orders.preload(hello, self.preloads)
            case WorkerLost(incarnation=incarnation):
                return self._worker_lost(incarnation, now_s)

    # --- placement ------------------------------------------------------------------------------

    def _submitted(self, submitted: GenerationRequest, now_s: float) -> list[Command]:
        assert submitted.request_id not in self.requests, f"{submitted.request_id} runs already"
        ledger = Ledger(before_s=submitted.phases_s, submitted_s=now_s)
        tier = self.tiers[submitted.qos_tier]
        request = Request(
            submitted=submitted, tier=tier, ledger=ledger, attempt=next(self.attempts)
        )
        request.promise = self.promises.claim(digest_of(request.spec), now_s)
        self.requests[request.request_id] = request
        return self._place(request, NO_CAPACITY, now_s)

    def _place(self, request: Request, otherwise: Refusal, now_s: float) -> list[Command]:
        """Ask the next decode worker; refuse for the last reason when none is left."""
        demand, verdict = self._consider(request, otherwise, now_s)
        match verdict:
            case Refusal() as refusal:
                return self._refuse(request, refusal, now_s)
            case Deferred(refusal=refusal, patience_s=patience_s):
                return self._wait(request, refusal, patience_s, now_s)
            case Admitted() as admitted:
                request.place(admitted, now_s)
                self.workers.book(demand, admitted, now_s)
                return [orders.ask(request.spec, admitted.candidate, request.within_s(now_s))]

    def _consider(
        self, request: Request, otherwise: Refusal, now_s: float
    ) -> tuple[Demand, Verdict]:
        """As asked, or if need be as its tier allows: with less output, or later."""
        if request.admitted:
            demand = self._demand(request, request.spec, now_s)
            return demand, self._judge(request, demand, otherwise, now_s)
        request.capped_tokens = None
        demand, tier = self._demand(request, request.spec, now_s), request.tier
        ladder = self.ladders.highest(tier)
        if ladder is not None and ladder.step is Step.TRIP and not self._in_reserve(request):
            return demand, tripped(tier, ladder, now_s)
        refusal = otherwise
        for way in ways(demand, tier, Step.NORMAL if ladder is None else ladder.step):
            judged = way if ladder is None else stricter(way, ladder.rules)
            verdict = self._judge(request, judged, otherwise, now_s)
            if not isinstance(verdict, Refusal):
                request.cap(way.spec.sampling.max_tokens)
                return way, verdict
            refusal = verdict if ladder is None else replace(verdict, hopeless=False)
            if not less_output_helps(refusal, demand):
                break
        waited_s = self.waiting.waited_s(request.request_id, now_s)
        return demand, deferred(refusal, tier, waited_s) or refusal

    def _in_reserve(self, request: Request) -> bool:
        """Whether the tier's own share of decode places has room for it."""
        own = (one for one in self.requests.values() if one.tier is request.tier and one.placed)
        taken = sum(len(one.choices) for one in own) + len(request.choices)
        return taken <= request.tier.share * self.workers.decode_places

    def _judge(self, request: Request, demand: Demand, otherwise: Refusal, now_s: float) -> Verdict:
        """What was admitted once is taken wherever there is a place for it."""
        objections = partial(self.quarantine.objection, avoided=request.avoided, now_s=now_s)
        choice = self.workers.choice(demand, request.tried, objections, self.forecast)
        suggested = self.placing.candidates(demand, choice, now_s)
        candidates = (one for one in suggested if choice.acceptable(one))
        policy = Capacity() if request.admitted else self.admitting
        return policy.judge(demand, candidates, otherwise, self.forecast, now_s)

    def _demand(self, request: Request, spec: RequestSpec, now_s: float) -> Demand:
        return Demand(
            spec=spec,
            output_tokens=self._output_tokens(request, spec),
            held=HeldPrefixes(spec, self.directory),
            objectives=request.objectives,
            priority=request.tier.priority,
            waited_s=request.ledger.age_s(now_s),
            promised=self._promised(request, -inf if request.promise else now_s + SOON_S),
            line=self._promised(request, inf),
        )

    def _output_tokens(self, request: Request, spec: RequestSpec) -> int:
        """Of each choice, still to come."""
        emitted, most = len(spec.emitted_ids), spec.sampling.max_tokens
        expected = self.lengths.quantile(
            request.tier.name, EXPECTED, max_tokens=most, emitted=emitted
        )
        return max(1, expected - emitted)

    def _promised(self, request: Request, before_s: float) -> Promised:
        """What goes before it at each worker though it isn't there yet."""
        if request.admitted or not self.promises:
            return NOTHING_PROMISED
        return self.workers.per_worker(self.promises.before(before_s))

    def _refuse(self, request: Request, refusal: Refusal, now_s: float) -> list[Command]:
        request_id = request.request_id
        if request.admitted:
            return self._wait(request, refusal, PATIENCE_S, now_s)
        self._forget(request)
        if refusal.retry_after_s is None and not refusal.hopeless:
            refusal = replace(refusal, retry_after_s=self._releases.retry_after_s())
        if request.promise is not None:
            self.promises.settle(kept=False)
        return [Refuse(request_id=request_id, refusal=self._promise(request, refusal, now_s))]

    def _promise(self, request: Request, refusal: Refusal, now_s: float) -> Refusal:
        soonest_s = refusal.retry_after_s
        if refusal.work is None or soonest_s is None:
            return refusal
        digest = digest_of(request.spec)
        retry_after_s = self.promises.make(digest, refusal.work, soonest_s, now_s)
        return replace(refusal, retry_after_s=retry_after_s)

    def _wait(
        self, request: Request, refusal: Refusal, patience_s: float, now_s: float
    ) -> list[Command]:
        """Without any worker there is nothing to wait for."""
        line = "" if request.admitted else request.tier.name
        waits = self.workers and self.waiting.try_wait(
            request.request_id, line, refusal, patience_s, now_s
        )
        if waits:
            request.placed = None
            return []
        if not request.admitted:
            return self._refuse(request, refusal, now_s)
        return self._fail(request, refusal.reason, f"can't go on: {refusal.message}")

    def _ask_again(self, now_s: float) -> list[Command]:
        """Whoever is refused again waits on, and its line with it."""
        commands: list[Command] = []
        due_s = now_s if self.workers else inf
        while (turn := self.waiting.take_next(due_s)) is not None:
            request_id, refusal = turn
            request = self.requests[request_id]
            request.tried.clear()
            commands += self._place(request, refusal, now_s)
        return commands

    def _climb(self, now_s: float) -> list[Command]:
        return [
            LadderStepped(tier=ladder.tier.name, step=ladder.step, cause=cause)
            for ladder, cause in self.ladders.climb(now_s)
        ]

    # --- what workers say -----------------------------------------------------------------------

    def _worker_said(self, said: WorkerSaid, now_s: float) -> list[Command]:
        view = self.workers.get(said.incarnation)
        if view is None:
            return []
        view.said(said.counters)
        for changes in said.blocks:
            self.directory.changed(said.incarnation, changes)
        commands: list[Command] = []
        for event in said.events:
            commands += self._one_said(view, event, now_s)
        return [*commands, *self._relieve(view, now_s)]

    def _one_said(self, view: WorkerView, event: WorkerEvent, now_s: float) -> list[Command]:
        if isinstance(event, Released | ReserveRefused):
            view.forget(event.key, now_s)
        if event.key in self.moving:
            return self._move_answered(event, now_s)
        request = self.requests.get(event.key.request_id)
        if request is None or request.key != event.key or view.incarnation not in request.legs:
            return []
        match event:
            case Tokens():
                return self._tokens(request, event, now_s)
            case Reserved(held_tokens=held_tokens):
                return self._reserved(request, held_tokens, now_s)
            case ReserveRefused(reason=reason):
                view.draining |= reason == DRAINING.reason
                self._forget_legs(request, now_s)
                return self._place(request, refused_by_worker(reason), now_s)
            case Lifetime():
                request.lived(event)
                return self._trust(request, event)
            case RequestFailed(reason=reason, message=message):
                suspected = self._suspect(request, event, now_s)
                return [*suspected, *self._leg_failed(request, reason, message, now_s)]
            case Released():
                return []

    def _reserved(self, request: Request, held_tokens: int, now_s: float) -> list[Command]:
        request.ledger.mark("reserved", now_s)
        self.waiting.leave(request.request_id)
        admitted = request.placed
        assert admitted is not None
        within_s = request.within_s(now_s)
        begin = orders.begin(request, admitted.candidate, held_tokens, within_s)
        if request.admitted:
            return begin
        request.admitted = True
        if request.promise is not None:
            self.promises.settle(kept=True)
        return [Admit(request_id=request.request_id), *begin]

    def _tokens(self, request: Request, event: Tokens, now_s: float) -> list[Command]:
        if event.first_index == len(request.resumed_ids):
            request.ledger.mark("first_token", event.at_s)
            request.ledger.mark("first_token_received", now_s)
            self.workers.prefilled(request.key, request.legs, now_s)
            self._learn_ttft(request, now_s)
            self._watch_ttft(request, now_s)
        request.ledger.mark("last_token", event.at_s)
        request.ledger.mark("last_token_received", now_s)
        ready = request.choices[event.choice].take(event)
        if not ready:
            return []
        self._learn_length(request, event)
        if request.done:
            self._learn_tpot(request, now_s)
            self._ended(request, now_s)
        return [Deliver(request_id=request.request_id, tokens=tuple(ready), done=request.done)]

    def _learn_ttft(self, request: Request, now_s: float) -> None:
        """Of a first try's first choice."""
        predicted, placed_s = request.predicted, request.placed_s
        if predicted is None or request.disturbed or any(c.next_index for c in request.choices):
            return
        self.forecast.ttft.observe(
            predicted.prompt.first_token_s,
            now_s - placed_s,
            undisturbed=predicted.prompt.queue_s <= 0,
        )

    def _watch_ttft(self, request: Request, now_s: float) -> None:
        """Of those that are held to their tier's objective."""
        first = not any(choice.next_index for choice in request.choices)
        if first and request.submitted.objectives.ttft_s is None:
            self.ladders.saw_ttft(request.tier.name, request.ledger.age_s(now_s), now_s)

    def _learn_tpot(self, request: Request, now_s: float) -> None:
        """Beside the longest steps that it was to have with those admitted after it."""
        predicted, placement, actual_s = request.predicted, request.placement, request.tpot_s()
        if actual_s is None:
            return
        if request.submitted.objectives.tpot_s is None:
            self.ladders.saw_tpot(request.tier.name, actual_s, now_s)
        if predicted is None or placement is None:
            return
        worker = self.workers.get(placement.decode)
        worst_s = 0.0 if worker is None else worker.peaks.since(request.placed_s)
        expected_s = max(0.0, worst_s - predicted.decode.step_s) + predicted.tpot_s
        self.forecast.tpot.observe(expected_s, actual_s, undisturbed=False)

    def _learn_length(self, request: Request, event: Tokens) -> None:
        if event.finish_reason is not None:
            tokens = request.choices[event.choice].next_index
            was_cut = event.finish_reason is not FinishReason.STOP
            self.lengths.observe(request.tier.name, tokens, was_cut=was_cut)

    # --- moves ----------------------------------------------------------------------------------

    def _relieve(self, view: WorkerView, now_s: float) -> list[Command]:
        wanted = self.moving.wanted(view, now_s)
        return [
            command
            for request, target in wanted
            for command in self._begin_move(request, view, target, now_s)
        ]

    def _begin_move(
        self, request: Request, source: WorkerView, target: WorkerView, now_s: float
    ) -> list[Command]:
        """It decodes on while the target is asked."""
        spec = self.moving.spec(request, next(self.attempts))
        demand = self._demand(request, spec, now_s)
        candidate = Candidate(decode=target, prefill=source)
        prediction = self.forecast.predict(demand, candidate, now_s)
        admitted = Admitted(candidate=candidate, prediction=prediction)
        if not self.moving.is_worth(admitted, demand.output_tokens):
            return []
        self.moving.begin(request, spec, admitted)
        self.workers.book(demand, admitted, now_s)
        return [orders.ask(spec, candidate, None)]

    def _move_answered(self, event: WorkerEvent, now_s: float) -> list[Command]:
        """Nothing changes where the target refuses, or the request went on otherwise."""
        move = self.moving.answered(event.key, now_s)
        if not isinstance(event, Reserved):
            return []
        request, candidate = self.requests.get(event.key.request_id), move.admitted.candidate
        if request is None or request.key != move.left:
            return [Send(worker=candidate.decode.incarnation, message=Abort(key=event.key))]
        aborts = self._abort_legs(request, now_s)
        self._forget_legs(request, now_s)
        request.move(move.spec)
        request.place(move.admitted, now_s)
        self.moving.moved += 1
        return [*aborts, *orders.begin(request, candidate, event.held_tokens, None)]

    # --- pairs ----------------------------------------------------------------------------------

    def _suspect(self, request: Request, failed: RequestFailed, now_s: float) -> list[Command]:
        """The link between its two workers, where the reason tells of it."""
        pair = request.placement.pair if request.placement else None
        if pair is None or failed.reason not in SUSPICIOUS:
            return []
        request.avoided.add(pair)
        seconds = self.quarantine.failed(pair, failed.reason, now_s)
        if seconds is None:
            return []
        return [
            PairQuarantined(
                pair=pair, seconds=seconds, reason=failed.reason, message=failed.message
            )
        ]

    def _trust(self, request: Request, moment: Lifetime) -> list[Command]:
        """Its KV has been handed over, or even checked."""
        pair = request.placement.pair if request.placement else None
        if pair is None or moment.name not in ("handoff_committed", "kv_checked"):
            return []
        checked = moment.name == "kv_checked"
        if not self.quarantine.succeeded(pair, begun_s=request.placed_s, checked=checked):
            return []
        return [PairTrusted(pair=pair)]

    # --- endings --------------------------------------------------------------------------------

    def _ended(self, request: Request, now_s: float) -> None:
        self._forget(request)
        self._releases.released(now_s)

    def _forget(self, request: Request) -> None:
        del self.requests[request.request_id]
        self.waiting.leave(request.request_id)

    def _stopped(self, event: ChoiceStopped, now_s: float) -> list[Command]:
        request = self.requests.get(event.request_id)
        if request is None or request.choices[event.choice].finished:
            return []
        request.choices[event.choice].finished = True
        if request.done:
            return self._aborted(event.request_id, now_s)
        if request.placement is None:
            return []  # told to the next worker once it has taken the request
        decode = request.placement.decode
        return [orders.stop(request, decode, event.choice, event.valid_tokens)]

    def _aborted(self, request_id: str, now_s: float) -> list[Command]:
        request = self.requests.get(request_id)
        if request is None:
            return []
        self._ended(request, now_s)
        return self._abort_legs(request, now_s)

    def _too_late(self, request_id: str, now_s: float) -> list[Command]:
        request = self.requests.get(request_id)
        if request is None:
            return []
        deadline_s = request.objectives.deadline_s or 0.0
        message = f"its deadline of {deadline_s:.3f} s has passed"
        failure = Fail(request_id=request_id, reason="deadline_exceeded", message=message)
        return [*self._aborted(request_id, now_s), failure]

    def _abort_legs(self, request: Request, now_s: float) -> list[Command]:
        """The workers say Released once nothing is held; until then the places stay taken. Of a
        prompt that has not been sent yet a prefill worker says nothing."""
        self.workers.prefilled(request.key, request.legs, now_s)
        return [send for send in orders.abort(request) if send.worker in self.workers]

    def _forget_legs(self, request: Request, now_s: float) -> None:
        self.workers.forget(request.key, request.legs, now_s)
        request.placed = None

    def _leg_failed(
        self, request: Request, reason: str, message: str, now_s: float
    ) -> list[Command]:
        """Run it again elsewhere; what the old attempt still says is dropped."""
        aborts = self._abort_legs(request, now_s)
        if request.tries >= MAX_ATTEMPTS:
            return [*aborts, *self._fail(request, reason, message)]
        self._forget_legs(request, now_s)
        request.try_again(next(self.attempts))
        refusal = Refusal(reason=reason, message=message)
        return [*aborts, *self._place(request, refusal, now_s)]

    def _fail(self, request: Request, reason: str, message: str) -> list[Command]:
        self._forget(request)
        return [Fail(request_id=request.request_id, reason=reason, message=message)]

    def _worker_lost(self, incarnation: Incarnation, now_s: float) -> list[Command]:
        view = self.workers.pop(incarnation, None)
        self.directory.lost(incarnation)
        if view is None:
            return []
        self.quarantine.forget(incarnation)
        self.moving.lost(incarnation, now_s)
        affected = [one for one in self.requests.values() if incarnation in one.legs]
        message = f"worker {view.hello.name} was lost"
        return [
            command
            for request in affected
            for command in self._leg_failed(request, "worker_lost", message, now_s)
        ]

    def validate(self) -> None:
        """A request waits, or is with workers that are here."""
        assert all(name in self.requests for name in self.waiting)
        for request in self.requests.values():
            assert all(leg in self.workers for leg in request.legs), f"{request.key} is nowhere"
            assert request.placement or request.request_id in self.waiting, f"{request.key}"
