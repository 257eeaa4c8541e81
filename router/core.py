"""Follows every request from submission to its last token. Pure; one per router.

    submitted -> reserving -> (Reserved) admitted -> tokens ... -> finished
                    `-> (ReserveRefused) next decode worker, or refused

A request whose worker fails is run again under the next attempt. Draws are counter based, so it
yields the same tokens; those already delivered are dropped by their index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvrelay.messages import (
    Abort,
    Counters,
    Generate,
    Lifetime,
    Prefill,
    Released,
    RequestFailed,
    Reserve,
    Reserved,
    ReserveRefused,
    Stop,
    Tokens,
    ToWorker,
    WorkerEvent,
    WorkerHello,
)
from kvrelay.types import Incarnation, RequestKey, RequestSpec
from router.admission import (
    NO_CAPACITY,
    Refusal,
    ReleaseClock,
    refusal_of,
    refused_by_worker,
)
from router.generation import ChoiceTokens, GenerationRequest
from router.ledger import Ledger
from router.placement import Placement, WorkerView, least_loaded

MAX_ATTEMPTS = 3
PATIENCE_S = 5.0
"""How long an admitted request whose worker failed waits for a place on another."""
ASK_AGAIN_S = 0.25


# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    request: GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceStopped:
    request_id: str
    choice: int
    valid_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    hello: WorkerHello


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSaid:
    incarnation: Incarnation
    events: tuple[WorkerEvent, ...]
    counters: Counters


Event = Submitted | ChoiceStopped | Aborted | WorkerJoined | WorkerLost | WorkerSaid


# --- commands -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    worker: Incarnation
    message: ToWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    request_id: str
    refusal: Refusal
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    request_id: str
    tokens: tuple[ChoiceTokens, ...]
    done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    request_id: str
    reason: str
    message: str


Command = Send | Admit | Refuse | Deliver | Fail


# --- state --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Retry:
    """No worker has taken this admitted request's next try yet."""

    refusal: Refusal
    next_s: float
    until_s: float


@dataclass(slots=True, kw_only=True)
class _Request:
    request: GenerationRequest
    ledger: Ledger
    attempt: int  # names this try: no two tries of this router share one
    tries: int = 1
    placement: Placement | None = None
    tried: set[Incarnation] = field(default_factory=set)
    admitted: bool = False
    retry: _Retry | None = None
    committed: bool = False  # this attempt's KV is at the decode worker
    next_index: dict[int, int] = field(default_factory=dict)  # choice |-> tokens delivered
    early: dict[tuple[int, int], Tokens] = field(default_factory=dict)  # overtook an earlier one
    finished: set[int] = field(default_factory=set)

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request.request_id, self.attempt)

    @property
    def spec(self) -> RequestSpec:
        return RequestSpec(
            key=self.key, prompt_ids=self.request.prompt_ids, sampling=self.request.sampling
        )

    @property
    def done(self) -> bool:
        return len(self.finished) == self.request.sampling.n

    @property
    def handed_over(self) -> bool:
        """KV and first tokens have left the prefill worker: it may die now."""
        choices = range(self.request.sampling.n)
        return self.committed and all(self.next_index.get(choice, 0) > 0 for choice in choices)

    @property
    def legs(self) -> tuple[Incarnation, ...]:
        """The workers that this attempt still needs."""
        if self.placement is None:
            return ()
        prefill = self.placement.prefill
        if prefill is None or self.handed_over:
            return (self.placement.decode,)
        return (self.placement.decode, prefill)


@dataclass(slots=True)
class RouterCore:
    """`attempts` numbers the tries of all requests: a request id may come again, or at another
    router, while a worker still holds the earlier one, so routers start at different numbers."""

    attempts: Iterator[int] = field(default_factory=count)
    workers: dict[Incarnation, WorkerView] = field(default_factory=dict)
    requests: dict[str, _Request] = field(default_factory=dict)
    _releases: ReleaseClock = field(default_factory=ReleaseClock)

    def handle(self, event: Event, now_s: float) -> list[Command]:
        return [*self._handle(event, now_s), *self._ask_again(now_s)]

    def _handle(self, event: Event, now_s: float) -> list[Command]:
        match event:
            case WorkerSaid():
                return self._worker_said(event, now_s)
            case Submitted(request=request):
                return self._submitted(request, now_s)
            case ChoiceStopped():
                return self._stopped(event, now_s)
            case Aborted(request_id=request_id):
                return self._aborted(request_id, now_s)
            case WorkerJoined(hello=hello):
                self.workers[hello.incarnation] = WorkerView(hello=hello)
                return []
            case WorkerLost(incarnation=incarnation):
                return self._worker_lost(incarnation, now_s)

    def ledger(self, request_id: str) -> Ledger:
        return self.requests[request_id].ledger

    # --- placement ------------------------------------------------------------------------------

    def _submitted(self, request: GenerationRequest, now_s: float) -> list[Command]:
        assert request.request_id not in self.requests, f"{request.request_id} runs already"
        ledger = Ledger(before_s=request.phases_s, submitted_s=now_s)
        state = _Request(request=request, ledger=ledger, attempt=next(self.attempts))
        self.requests[request.request_id] = state
        return self._place(state, NO_CAPACITY, now_s)

    def _place(self, state: _Request, otherwise: Refusal, now_s: float) -> list[Command]:
        """Ask the next decode worker; refuse for the last reason when none is left."""
        refusal = otherwise
        while True:
            found = least_loaded(state.spec, self.workers.values(), tried=state.tried)
            if found is None:
                return self._refuse(state, refusal, now_s)
            full = refusal_of(state.spec, self.workers[found.decode])
            if full is None:
                break
            refusal = full
            state.tried.add(found.decode)
        state.placement = found
        state.tried.add(found.decode)
        state.ledger.mark("placed", now_s)
        return [self._ask(state, found)]

    def _ask(self, state: _Request, placement: Placement) -> Send:
        spec = state.spec
        self.workers[placement.decode].sequences[spec.key] = spec.sampling.n
        if placement.prefill is None:
            return Send(worker=placement.decode, message=Generate(spec=spec))
        self.workers[placement.prefill].prompt_tokens[spec.key] = len(spec.prompt_ids)
        return Send(worker=placement.decode, message=Reserve(spec=spec, source=placement.prefill))

    def _refuse(self, state: _Request, refusal: Refusal, now_s: float) -> list[Command]:
        request_id = state.request.request_id
        if state.admitted:
            return self._wait(state, refusal, now_s)
        del self.requests[request_id]
        retry_after_s = self._releases.retry_after_s()
        return [Refuse(request_id=request_id, refusal=refusal, retry_after_s=retry_after_s)]

    def _wait(self, state: _Request, refusal: Refusal, now_s: float) -> list[Command]:
        """Places come free, workers come back; what workers say is the clock. Without any worker
        there is none."""
        until_s = state.retry.until_s if state.retry is not None else now_s + PATIENCE_S
        if now_s >= until_s or not self.workers:
            return self._fail(state, refusal.reason, f"can't go on: {refusal.message}")
        state.placement = None
        state.retry = _Retry(refusal=refusal, next_s=now_s + ASK_AGAIN_S, until_s=until_s)
        return []

    def _ask_again(self, now_s: float) -> list[Command]:
        commands: list[Command] = []
        for state in list(self.requests.values()):
            if state.retry is None or state.placement is not None:
                continue
            if state.retry.next_s <= now_s or not self.workers:
                state.tried.clear()
                commands += self._place(state, state.retry.refusal, now_s)
        return commands

    # --- what workers say -----------------------------------------------------------------------

    def _worker_said(self, said: WorkerSaid, now_s: float) -> list[Command]:
        view = self.workers.get(said.incarnation)
        if view is None:
            return []
        view.counters = said.counters
        commands: list[Command] = []
        for event in said.events:
            commands += self._one_said(view, event, now_s)
        return commands

    def _one_said(self, view: WorkerView, event: WorkerEvent, now_s: float) -> list[Command]:
        if isinstance(event, Released | ReserveRefused):
            view.forget(event.key)
        state = self.requests.get(event.key.request_id)
        if state is None or state.key != event.key or view.incarnation not in state.legs:
            return []
        match event:
            case Tokens():
                return self._tokens(state, event, now_s)
            case Reserved():
                return self._reserved(state, now_s)
            case ReserveRefused(reason=reason):
                self._forget_legs(state)
                return self._place(state, refused_by_worker(reason), now_s)
            case Lifetime(name=name, at_s=at_s):
                state.committed |= name == "handoff_committed"
                state.ledger.mark(name, at_s)
                return []
            case RequestFailed(reason=reason, message=message):
                return self._leg_failed(state, reason, message, now_s)
            case Released():
                return []

    def _reserved(self, state: _Request, now_s: float) -> list[Command]:
        state.ledger.mark("reserved", now_s)
        state.retry = None
        commands: list[Command] = []
        if not state.admitted:
            state.admitted = True
            commands.append(Admit(request_id=state.request.request_id))
        placement = state.placement
        assert placement is not None
        commands += self._stops(state, placement.decode)
        if placement.prefill is None:
            return commands
        target = self.workers[placement.decode].hello
        message = Prefill(
            spec=state.spec, target_address=target.transfer_address, target=target.incarnation
        )
        return [*commands, Send(worker=placement.prefill, message=message)]

    @staticmethod
    def _stops(state: _Request, decode: Incarnation) -> list[Command]:
        """Choices that ended in an earlier attempt need no decoding in this one."""
        return [
            Send(
                worker=decode,
                message=Stop(
                    key=state.key, choice=choice, valid_tokens=state.next_index.get(choice, 0)
                ),
            )
            for choice in sorted(state.finished)
        ]

    def _tokens(self, state: _Request, event: Tokens, now_s: float) -> list[Command]:
        """In index order, each once: what overtook an earlier token waits for it."""
        state.early[event.choice, event.first_index] = event
        ready: list[ChoiceTokens] = []
        while (tokens := self._next_tokens(state, event.choice)) is not None:
            ready.append(tokens)
        if event.first_index == 0:
            state.ledger.mark("first_token", event.at_s)
            state.ledger.mark("first_token_received", now_s)
            self._prefilled(state)
        state.ledger.mark("last_token", event.at_s)
        state.ledger.mark("last_token_received", now_s)
        return self._deliver(state, ready, now_s)

    @staticmethod
    def _next_tokens(state: _Request, choice: int) -> ChoiceTokens | None:
        at = state.next_index.get(choice, 0)
        due = [key for key in state.early if key[0] == choice and key[1] <= at]
        for key in sorted(due):
            event = state.early.pop(key)
            skip = at - event.first_index
            if choice in state.finished or skip >= len(event.token_ids):
                continue
            state.next_index[choice] = event.first_index + len(event.token_ids)
            if event.finish_reason is not None:
                state.finished.add(choice)
            return ChoiceTokens(
                choice=choice,
                token_ids=event.token_ids[skip:],
                logprobs=event.logprobs[skip:],
                finish_reason=event.finish_reason,
                stop_token_id=event.stop_token_id,
            )
        return None

    def _prefilled(self, state: _Request) -> None:
        if state.placement is not None and state.placement.prefill is not None:
            view = self.workers.get(state.placement.prefill)
            if view is not None:
                view.prompt_tokens.pop(state.key, None)

    def _deliver(
        self, state: _Request, ready: Sequence[ChoiceTokens], now_s: float
    ) -> list[Command]:
        if not ready:
            return []
        request_id = state.request.request_id
        if state.done:
            self._ended(state, now_s)
        return [Deliver(request_id=request_id, tokens=tuple(ready), done=state.done)]

    # --- endings --------------------------------------------------------------------------------

    def _ended(self, state: _Request, now_s: float) -> None:
        del self.requests[state.request.request_id]
        self._releases.released(now_s)

    def _stopped(self, event: ChoiceStopped, now_s: float) -> list[Command]:
        state = self.requests.get(event.request_id)
        if state is None or event.choice in state.finished:
            return []
        state.finished.add(event.choice)
        if state.done:
            return self._aborted(event.request_id, now_s)
        if state.placement is None:
            return []  # told to the next worker once it has taken the request
        message = Stop(key=state.key, choice=event.choice, valid_tokens=event.valid_tokens)
        return [Send(worker=state.placement.decode, message=message)]

    def _aborted(self, request_id: str, now_s: float) -> list[Command]:
        state = self.requests.get(request_id)
        if state is None:
            return []
        self._ended(state, now_s)
        return self._abort_legs(state)

    def _abort_legs(self, state: _Request) -> list[Command]:
        """The workers say Released once nothing is held; until then the places stay taken. Of a
        prompt that has not been sent yet a prefill worker says nothing."""
        for leg in state.legs:
            if leg in self.workers:
                self.workers[leg].prompt_tokens.pop(state.key, None)
        return [
            Send(worker=leg, message=Abort(key=state.key))
            for leg in state.legs
            if leg in self.workers
        ]

    def _forget_legs(self, state: _Request) -> None:
        for leg in state.legs:
            if leg in self.workers:
                self.workers[leg].forget(state.key)
        state.placement = None

    def _leg_failed(
        self, state: _Request, reason: str, message: str, now_s: float
    ) -> list[Command]:
        """Run it again elsewhere; what the old attempt still says is dropped."""
        aborts = self._abort_legs(state)
        if state.tries >= MAX_ATTEMPTS:
            return [*aborts, *self._fail(state, reason, message)]
        self._forget_legs(state)
        state.tries += 1
        state.attempt = next(self.attempts)
        state.committed = False
        state.early.clear()
        state.tried.clear()
        refusal = Refusal(reason=reason, message=message)
        return [*aborts, *self._place(state, refusal, now_s)]

    def _fail(self, state: _Request, reason: str, message: str) -> list[Command]:
        self.requests.pop(state.request.request_id, None)
        return [Fail(request_id=state.request.request_id, reason=reason, message=message)]

    def _worker_lost(self, incarnation: Incarnation, now_s: float) -> list[Command]:
        view = self.workers.pop(incarnation, None)
        if view is None:
            return []
        affected = [state for state in self.requests.values() if incarnation in state.legs]
        message = f"worker {view.hello.name} was lost"
        return [
            command
            for state in affected
            for command in self._leg_failed(state, "worker_lost", message, now_s)
        ]
