"""A simulated router: the core of a real one, streams to simulated workers, and the clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from typing import Protocol, assert_never

from cluster.config.simulation import ServiceSection, Simulation
from cluster.core.worker.events import FromRouter, RouterJoined
from cluster.sim.arriving import PromptParts
from cluster.sim.machines.clock import Clock, Server
from cluster.sim.trace import Answers, Outcome, TraceArrival
from cluster.sim.worker import SimWorker
from kvrelay.counters import Counters
from kvrelay.messages import BlockChanges, WorkerEvent
from kvrelay.types import NO_OBJECTIVES, Incarnation, Objectives
from router.core.core import RouterCore
from router.core.events import (
    Admit,
    Command,
    Deliver,
    Event,
    Fail,
    LadderStepped,
    PairQuarantined,
    PairTrusted,
    Refuse,
    Send,
    Submitted,
    TimePassed,
    WorkerJoined,
    WorkerLost,
    WorkerSaid,
)
from router.core.faults.silence import PERIOD_S
from router.core.promises.work import ToldPromise
from router.core.request import Request
from router.core.state.generation import GenerationRequest


class _Stream:
    """Implements cluster.core.worker.events.RouterStream: from one worker."""

    def __init__(self, router: SimRouter, worker: Incarnation) -> None:
        self._router = router
        self._worker = worker

    def send(
        self,
        events: Sequence[WorkerEvent],
        counters: Counters,
        blocks: Sequence[BlockChanges] = (),
    ) -> None:
        said = WorkerSaid(
            incarnation=self._worker,
            events=tuple(events),
            counters=counters,
            blocks=tuple(blocks),
        )
        self._router.later(said)


class SimulatedClients(Protocol):
    def hear(self, command: Admit | Refuse | Deliver | Fail) -> None: ...


class SimRouter:
    """`latency_s` is that of a message to a worker, or back; `service` says what takes it time."""

    def __init__(
        self, core: RouterCore, clock: Clock, latency_s: float, service: ServiceSection
    ) -> None:
        self.core = core
        self._clock = clock
        self._latency_s = latency_s
        self._server = Server(clock)
        self._service_s: dict[type, float] = {
            kind: seconds
            for kind, seconds in (
                (Submitted, service.router_request),
                (WorkerSaid, service.router_message),
            )
            if seconds is not None
        }
        self._workers: dict[Incarnation, SimWorker] = {}
        self._streams: dict[Incarnation, _Stream] = {}
        self._clients: SimulatedClients | None = None
        self.level_changes = 0

    def attach(self, worker: SimWorker) -> None:
        """It may come at any time."""
        stream = _Stream(self, worker.incarnation)
        self._workers[worker.incarnation] = worker
        self._streams[worker.incarnation] = stream
        self.hear(WorkerJoined(hello=worker.hello))
        worker.hear((RouterJoined(stream),))

    def serve(self, clients: SimulatedClients) -> None:
        self._clients = clients

    def later(self, said: WorkerSaid) -> None:
        self._clock.after(self._latency_s, self.hear, said)

    def later_lost(self, worker: Incarnation) -> None:
        self._clock.after(self._latency_s, self._lose, worker)

    def _lose(self, worker: Incarnation) -> None:
        self.hear(WorkerLost(incarnation=worker))
        self._watch_waiting()

    def _watch_waiting(self) -> None:
        if self.core.state.waiting and not self.core.state.workers:
            self._clock.after(PERIOD_S, self._pass_time)

    def _pass_time(self, _: object = None) -> None:
        self.hear(TimePassed())
        self._watch_waiting()

    def hear(self, event: Event) -> None:
        """At once, or when it has done what came before."""
        if self._service_s:
            self._server.serve(self._service_s.get(type(event), 0.0), self._handle, event)
            return
        for command in self.core.handle(event, self._clock.now_s):
            self._execute(command)

    def _handle(self, event: Event) -> None:
        for command in self.core.handle(event, self._clock.now_s):
            self._execute(command)

    def _execute(self, command: Command) -> None:
        match command:
            case Send(worker=worker, message=message):
                events = (FromRouter(self._streams[worker], message),)
                self._clock.after(self._latency_s, self._workers[worker].hear, events)
            case LadderStepped():
                self.level_changes += 1
            case PairQuarantined() | PairTrusted():
                pass  # for the log
            case _:
                assert self._clients is not None
                self._clients.hear(command)


class Clients:
    """Open loop: each request comes when the trace says so, whatever became of the others.

    They take the routers in turn, or at random. One that is refused comes back as often as
    `retries` says, when it was told to, and brings the promise along.
    """

    def __init__(
        self,
        routers: Sequence[SimRouter],
        clock: Clock,
        arrivals: Sequence[TraceArrival],
        answers: Answers,
        simulation: Simulation,
        draw: Callable[[], float],
        block_size: int,
    ) -> None:
        self._routers = routers
        self._clock = clock
        self._arrivals = arrivals
        self._answers = answers
        self._retries = simulation.retries
        self._rounding_s = simulation.retry_rounding
        self._draw = draw
        self._is_random = simulation.balancing == "random"
        self._brings_promise = simulation.promise_sent
        self._promises: dict[int, ToldPromise | None] = {}  # number |-> what it was told
        self._sent_to: dict[int, SimRouter] = {}  # number |-> where it was sent last
        self._comes_back = [draw() < simulation.retrying_share for _ in arrivals]
        self.parts = PromptParts(clock, simulation.arriving, block_size, self._submit)
        share = simulation.arriving.share
        self._arrives_in_parts = [share > 0 and draw() < share for _ in arrivals]
        slo = simulation.slo
        self._objectives = Objectives(ttft_s=slo.ttft, tpot_s=slo.tpot)
        if not slo.told:
            self._objectives = NO_OBJECTIVES
        self._admitted: dict[str, Request] = {}  # without a token yet
        self._open = len(arrivals)
        self.outcomes = [Outcome(request=one.request) for one in arrivals]

    def _next_router(self, number: int) -> SimRouter:
        routers = self._routers
        return routers[
            int(self._draw() * len(routers)) if self._is_random else number % len(routers)
        ]

    def is_waiting(self) -> bool:
        """For a request to come, or to end."""
        return self._open > 0

    def begin(self) -> None:
        """One arrival waits on the clock at a time, and all that come in parts."""
        for number, in_parts in enumerate(self._arrives_in_parts):
            if in_parts:
                router = self._sent_to[number] = self._next_router(number)
                self.parts.expect(number, self._arrivals[number], router)
        self._next(0)

    def _next(self, number: int) -> None:
        if number < len(self._arrivals):
            self._clock.at(self._arrivals[number].request.arrival_s, self._arrive, number)

    def _arrive(self, number: int) -> None:
        self._next(number + 1)
        if self._arrives_in_parts[number]:
            self.parts.arrived(number)
        else:
            self._submit(number)

    def _submit(self, number: int) -> None:
        arrival = self._arrivals[number]
        if self.outcomes[number].retries:
            self.outcomes[number].resubmitted_s = self._clock.now_s
        request = GenerationRequest(
            request_id=str(number),
            prompt_ids=arrival.prompt,
            sampling=self._answers.sampling(number),
            tenant=arrival.request.tenant,
            objectives=self._objectives,
            promise=self._promises.pop(number, None),
        )
        is_first = not self.outcomes[number].retries
        if not (is_first and self._arrives_in_parts[number]):  # else where its parts went
            self._sent_to[number] = self._next_router(number)
        self._sent_to[number].hear(Submitted(request=request))

    def hear(self, command: Admit | Refuse | Deliver | Fail) -> None:
        if self.parts.are_any and self.parts.hear(command):
            return
        outcome, now_s = self.outcomes[int(command.request_id)], self._clock.now_s
        match command:
            case Admit():
                outcome.admitted_s = now_s
                core = self._sent_to[int(command.request_id)].core
                self._admitted[command.request_id] = core.state.requests[command.request_id]
            case Refuse():
                self._refused(command, outcome)
            case Deliver():
                self._delivered(command, outcome)
            case Fail(reason=reason):
                outcome.failed = reason
                self._admitted.pop(command.request_id, None)
                self._open -= 1
            case _:
                assert_never(command)

    def _refused(self, command: Refuse, outcome: Outcome) -> None:
        outcome.refusals += 1
        retry_after_s, number = command.refusal.retry_after_s, int(command.request_id)
        if retry_after_s is None or outcome.retries >= self._retries or self._gives_up(number):
            outcome.refused = command.refusal.reason
            self._open -= 1
            return
        outcome.retries += 1
        delay_s = self._rounded_s(retry_after_s)
        if self._brings_promise and (promise := command.refusal.promise) is not None:
            self._promises[number] = replace(promise, due_in_s=promise.due_in_s - delay_s)
        self._clock.after(delay_s, self._submit, number)

    def _gives_up(self, number: int) -> bool:
        return not self._comes_back[number]

    def _rounded_s(self, seconds: float) -> float:
        step_s = self._rounding_s
        return ceil(seconds / step_s) * step_s if step_s else seconds

    def _delivered(self, command: Deliver, outcome: Outcome) -> None:
        now_s = self._clock.now_s
        if outcome.first_token_s is None:
            outcome.first_token_s = now_s
            request = self._admitted.pop(command.request_id)
            outcome.cached_tokens = request.cached_tokens
            outcome.prefilled_locally = request.ledger.is_local
            outcome.ledger = request.ledger
        outcome.last_token_s = now_s
        outcome.tokens += sum(len(one.token_ids) for one in command.tokens)
        outcome.done = command.done
        self._open -= command.done
