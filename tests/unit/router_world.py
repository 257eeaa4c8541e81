"""Router cores among workers that answer in a random order, fail, drain and die; without devices.

After every event the laws of the router's state are checked. A choice's tokens are their indices.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field, replace
from random import Random

from kvrelay.counters import Counters
from kvrelay.messages import (
    Abort,
    Generate,
    Lifetime,
    Prefill,
    Released,
    RequestFailed,
    Reserve,
    Reserved,
    ReserveRefused,
    Tokens,
    ToWorker,
    WorkerEvent,
)
from kvrelay.types import FinishReason, Incarnation, RequestKey, RequestSpec, Role
from router.core.core import RouterCore
from router.core.events import (
    Aborted,
    ChoiceStopped,
    DeadlinePassed,
    Deliver,
    Event,
    Fail,
    Refuse,
    Send,
    Submitted,
    WorkerEnded,
    WorkerJoined,
    WorkerLost,
    WorkerSaid,
)
from router.core.faults.poison import Blame, Ending
from router.core.promises.work import ToldPromise
from router.core.router_state import RouterState
from router.core.state.generation import ChoiceTokens, GenerationRequest
from tests.unit.router_kit import hello

REFUSALS = ("slots_exhausted", "kv_exhausted", "tpot_unreachable", "draining")
FAILURES = ("transfer_failed", "handoff_timeout", "internal")
PATIENCE_S = 2.0
"""Some requests run out of it."""
SETTLE_S = 10.0
"""Longer than any patience."""


@dataclass(slots=True)
class Worker:
    """`says`: # request |-> what it will say, in that order; other orders are drawn."""

    role: Role
    holds: set[RequestKey] = field(default_factory=set)
    says: dict[RequestKey, deque[WorkerEvent]] = field(default_factory=lambda: defaultdict(deque))
    draining: bool = False


class World:
    """`moves`: # number of choices |-> how many requests with so many were moved"""

    def __init__(
        self, seed: int, *states: RouterState, pressed: bool = False, fails: bool = True
    ) -> None:
        """`pressed`: decode workers say that nearly all of their blocks are taken. `fails`: also
        those that neither drain nor die."""
        self.random = Random(seed)
        for state in states:
            state.failover_patience_s = PATIENCE_S
        self.cores = [RouterCore(state) for state in states]
        self.pressed, self.fails = pressed, fails
        self.now_s = 1.0
        self.moves: Counter[int] = Counter()
        self.delivered: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.workers: dict[Incarnation, Worker] = {}
        self.ended: dict[str, str] = {}
        self.owners: dict[str, RouterCore] = {}
        self.told: list[ToldPromise] = []
        self._lives = 0
        self._missing: list[Role] = []
        self._endings: list[WorkerEnded] = []

    # --- what happens ---------------------------------------------------------------------------

    def join(self, role: Role) -> None:
        self._lives += 1
        name = f"{role}-{self._lives}"
        self.workers[Incarnation(name)] = Worker(role)
        blocks = 20 if self.pressed else 200
        told = replace(hello(name, role, max_model_len=128), total_blocks=blocks, kv_token_bytes=1)
        self.tell(WorkerJoined(hello=told))

    def kill(self) -> None:
        """Another one comes at once, or with the next one that is killed."""
        self._rejoin()
        worker = self.random.choice([*self.workers])
        lost = self.workers.pop(worker)
        self._missing.append(lost.role)
        asked = self.random.random() < 0.7
        if asked:
            self._endings.append(WorkerEnded(incarnation=worker, ending=self._ending(lost)))
        self.tell(WorkerLost(incarnation=worker, asked=asked))
        if self.random.random() < 0.5:
            self._rejoin()

    def _ending(self, lost: Worker) -> Ending:
        """Some of what it held was in its last step."""
        held = sorted(lost.holds, key=str)
        step = self.random.sample(held, min(len(held), self.random.choice((1, 3, 9, 9))))
        blame, complete = self.random.choice([*Blame]), self.random.random() < 0.9
        return Ending(blame=blame, step=tuple(step), complete=complete)

    def hear_of_an_end(self) -> None:
        """Of a worker that was lost, perhaps a while ago."""
        if self._endings:
            self.tell(self._endings.pop(self.random.randrange(len(self._endings))))

    def _rejoin(self) -> None:
        missing, self._missing = self._missing, []
        for role in missing:
            self.join(role)

    def drain(self) -> None:
        """Another worker takes its place."""
        if not self.workers:
            return
        worker = self.random.choice([*self.workers.values()])
        if not worker.draining:
            worker.draining = True
            self.join(worker.role)

    def leave(self) -> None:
        """Those that have drained, and hold nothing."""
        for name, worker in [*self.workers.items()]:
            if worker.draining and not worker.holds and not any(worker.says.values()):
                del self.workers[name]
                self.tell(WorkerLost(incarnation=name))

    def submit(self, request: GenerationRequest) -> None:
        """At any router. Some bring back what one of those before was told, in time or not, perhaps
        twice."""
        if self.told and self.random.random() < 0.7:
            told = self.random.choice(self.told)
            brought = replace(told, due_in_s=self.random.uniform(-2, 1))
            request = replace(request, promise=self.random.choice((told, brought)))
        core = self.random.choice(self.cores)
        self.owners[request.request_id] = core
        self._tell(core, Submitted(request=request))

    def disturb(self) -> None:
        """A client gives up, its time is over, or it has seen a stop string."""
        running = [one for core in self.cores for one in core.state.requests.values()]
        if not running:
            return
        request, drawn = self.random.choice(running), self.random.random()
        name, core = request.request_id, self.owners[request.request_id]
        if drawn < 0.4:
            self._tell(core, Aborted(request_id=name))
        elif drawn < 0.6:
            self._tell(core, DeadlinePassed(request_id=name))
        else:
            choice = self.random.randrange(len(request.choices))
            self._tell(core, ChoiceStopped(request_id=name, choice=choice, valid_tokens=0))

    def answer(self) -> bool:
        """Some worker says what is next of one of its requests; False: none has anything to say."""
        if self.random.random() < 0.1:
            self.hear_of_an_end()
        speaking = [name for name, worker in self.workers.items() if any(worker.says.values())]
        if not speaking:
            return False
        name = self.random.choice(speaking)
        worker = self.workers[name]
        key = self.random.choice([key for key, events in worker.says.items() if events])
        event = worker.says[key].popleft()
        if isinstance(event, Released | ReserveRefused):
            worker.holds.discard(key)
        self.report(name, event)
        return True

    def report(self, name: Incarnation, *events: WorkerEvent) -> None:
        """Each router hears of its own requests, and of the worker's state."""
        worker = self.workers[name]
        running = 0 if worker.role is Role.PREFILL else min(4, len(worker.holds))
        active = 19 if self.pressed and running else 0
        counters = Counters(running=running, active_blocks=active, draining=worker.draining)
        for core in self.cores:
            own = tuple([one for one in events if self.owners[one.key.request_id] is core])
            self._tell(core, WorkerSaid(incarnation=name, events=own, counters=counters))

    def tell(self, event: Event) -> None:
        """All routers."""
        for core in self.cores:
            self._tell(core, event)

    def _tell(self, core: RouterCore, event: Event) -> None:
        self.now_s += self.random.uniform(0.001, 0.05)
        for command in core.handle(event, self.now_s):
            match command:
                case Send(worker=worker, message=message):
                    self._hear(worker, message)
                case Refuse(request_id=request_id, refusal=refusal):
                    self._end(request_id, "refused")
                    if refusal.promise is not None:
                        self.told.append(refusal.promise)
                case Fail(request_id=request_id):
                    self._end(request_id, "failed")
                case Deliver(request_id=request_id, tokens=tokens, done=done):
                    self._deliver(request_id, tokens)
                    if done:
                        self._end(request_id, "done")
        core.validate()

    def _deliver(self, request_id: str, tokens: tuple[ChoiceTokens, ...]) -> None:
        """None is lost, and none comes twice."""
        for one in tokens:
            known = self.delivered[request_id, one.choice]
            known += one.token_ids
            assert known == [*range(len(known))], (request_id, one.choice, known)

    def _end(self, request_id: str, how: str) -> None:
        assert request_id not in self.ended, f"{request_id} was {self.ended[request_id]}"
        assert request_id not in self.owners[request_id].state.requests
        self.ended[request_id] = how

    def finish(self) -> None:
        """Nothing disturbs any more: all ends, and all is given back."""
        self._rejoin()
        for worker in self.workers.values():
            worker.draining = False
        for role in {worker.role for worker in self.workers.values()}:
            self.join(role)
        until_s = self.now_s + SETTLE_S
        while self.answer() or (self._runs() and self.now_s < until_s):
            self.report(self.random.choice([*self.workers]))
        for worker in self.workers.values():
            assert not worker.holds
        for core in self.cores:
            _assert_settled(core.state)

    def _runs(self) -> bool:
        return any(core.state.requests for core in self.cores)

    # --- workers --------------------------------------------------------------------------------

    def _hear(self, name: Incarnation, message: ToWorker) -> None:
        worker = self.workers.get(name)
        if worker is None:
            return
        match message:
            case Reserve(spec=spec):
                self._take(worker, spec, Reserved(key=spec.key, at_s=self.now_s))
            case Generate(spec=spec) if self._take(
                worker, spec, Reserved(key=spec.key, at_s=self.now_s)
            ):
                worker.says[spec.key] += [*self._tokens(spec, 0), self._released(spec)]
            case Prefill():
                self._prefill(worker, message)
            case Abort(key=key):
                self._abort(worker, key)
            case _:
                pass

    def _abort(self, worker: Worker, key: RequestKey) -> None:
        on_its_way = (Reserved, ReserveRefused)
        said = [one for one in worker.says[key] if isinstance(one, on_its_way)]
        worker.says[key] = deque(said)
        if key in worker.holds:
            worker.says[key].append(Released(key=key, at_s=self.now_s))

    def _take(self, worker: Worker, spec: RequestSpec, answer: WorkerEvent) -> bool:
        refuses = worker.draining or self.random.random() < 0.1
        if refuses:
            reason = "draining" if worker.draining else self.random.choice(REFUSALS[:3])
            answer = ReserveRefused(key=spec.key, at_s=self.now_s, reason=reason)
        else:
            worker.holds.add(spec.key)
        worker.says[spec.key].append(answer)
        return not refuses

    def _prefill(self, worker: Worker, message: Prefill) -> None:
        spec, target, key = message.spec, message.target, message.spec.key
        says = worker.says[key]
        if message.leaves is not None:
            self._abort(worker, key._replace(attempt=message.leaves))
            self.moves[spec.sampling.n] += 1
        elif worker.draining:
            says.append(ReserveRefused(key=key, at_s=self.now_s, reason="draining"))
            return
        worker.holds.add(key)
        if target is None:
            says.append(Reserved(key=key, at_s=self.now_s))
        says.append(Lifetime(key=key, at_s=self.now_s, name="prefill_started"))
        if self.fails and self.random.random() < 0.1:
            reason = self.random.choice(FAILURES)
            says.append(RequestFailed(key=key, at_s=self.now_s, reason=reason, message="why"))
        else:
            says += self._first_tokens(spec)
            self._decode(target, spec)
        says.append(self._released(spec))

    def _first_tokens(self, spec: RequestSpec) -> list[WorkerEvent]:
        if not spec.sampling.max_tokens:
            return [self._piece(spec, choice, 0, 0) for choice in range(spec.sampling.n)]
        open_ = set(range(spec.sampling.n)) - {*spec.finished_choices}
        fresh = [choice for choice in sorted(open_) if not spec.resumed_by(choice)]
        return [self._piece(spec, choice, len(spec.emitted_ids), 1) for choice in fresh]

    def _decode(self, target: Incarnation | None, spec: RequestSpec) -> None:
        worker = None if target is None else self.workers.get(target)
        if worker is None or spec.key not in worker.holds:
            return
        committed = Lifetime(key=spec.key, at_s=self.now_s, name="handoff_committed")
        worker.says[spec.key] += [committed, *self._tokens(spec, 1), self._released(spec)]

    def _tokens(self, spec: RequestSpec, drawn: int) -> list[WorkerEvent]:
        """Of all choices, in pieces; `drawn` of each by the prefill worker, where it draws any."""
        events: list[WorkerEvent] = []
        for choice in range(spec.sampling.n):
            resumed = len(spec.resumed_by(choice))
            at = len(spec.emitted_ids) + (resumed or drawn)
            while choice not in spec.finished_choices and at < spec.sampling.max_tokens:
                count = min(self.random.randint(1, 8), spec.sampling.max_tokens - at)
                events.append(self._piece(spec, choice, at, count))
                at += count
        return events

    def _piece(self, spec: RequestSpec, choice: int, at: int, count: int) -> Tokens:
        is_last = at + count >= spec.sampling.max_tokens
        return Tokens(
            key=spec.key,
            at_s=self.now_s,
            choice=choice,
            first_index=at,
            token_ids=tuple(range(at, at + count)),
            finish_reason=FinishReason.LENGTH if is_last else None,
        )

    def _released(self, spec: RequestSpec) -> Released:
        return Released(key=spec.key, at_s=self.now_s)


def _assert_settled(state: RouterState) -> None:
    assert not state.requests and not state.waiting, [*state.requests.values()]
    assert not state.moves.pending and not state.promises.claimed
    for view in state.workers.values():
        assert not view.outlook.sequences and not len(view.queue), view.incarnation
        assert not view.unreleased, view.incarnation
