"""Prompts that wait at the router until a prefill worker is about to be free. Pure.

They leave in the order in which a prefill worker computes its own (`engine.core.prompt_order`).
Each goes to a worker that has less than about a chunk left to compute; among several such workers,
to the one that is done first. So no prompt waits behind another at a worker that is slow or gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from engine.core.prompt_order import Order
from engine.core.step_times import NotCovered, StepWork
from kvpool.core.layout.hashes import tenant_name
from kvrelay.qos import QosTiers
from kvrelay.types import RequestKey, RequestSpec
from router.core import lifecycle
from router.core.decision import demand_of
from router.core.events import Command
from router.core.policy.admission import Admitted
from router.core.policy.forecast import wait_s
from router.core.request import Request
from router.core.router_state import RouterState
from router.core.state.candidate import Candidate, PromptPrediction
from router.core.state.demand import Demand
from router.core.state.quarantine import Pair
from router.core.state.worker_view import WorkerView
from router.core.workers import Workers, book_prefill, fitting

LOOKED_AT = 8
"""Prompts that are looked at, in the queue's order, among those that a free worker could take."""


@dataclass(slots=True, kw_only=True, eq=False)
class Queued:
    """Implements `engine.core.prompt_order.OrderedPrompt`. It will probably take `seconds`; the
    decode worker holds the KV of its first `held_tokens`."""

    spec: RequestSpec
    seconds: float
    priority: int
    within_s: float | None = None
    held_tokens: int = 0
    since_s: float = 0.0  # when it was certain
    arrival: int = 0
    deadline_s: float | None = None
    left_s: float = 0.0

    @property
    def key(self) -> RequestKey:
        return self.spec.key

    @property
    def tenant(self) -> str:
        return tenant_name(self.spec.tenant)

    @property
    def qos_tier(self) -> str:
        return self.spec.qos_tier

    @property
    def is_resumed(self) -> bool:
        return bool(self.spec.emitted_ids or self.spec.resumed)

    @property
    def computed(self) -> int:
        return 0

    @property
    def remaining(self) -> int:
        return self.spec.context_tokens


@dataclass(slots=True, kw_only=True)
class SharedQueue:
    """Prompts whose slot at a decode worker isn't certain yet are expected: they count in forecasts
    and are given to no worker."""

    order: Order[Queued] = field(default_factory=Order)
    _expected: dict[RequestKey, Queued] = field(default_factory=dict)
    _waiting: dict[RequestKey, Queued] = field(default_factory=dict)
    _seconds: dict[int, float] = field(default_factory=dict)  # by priority, of both
    _level: tuple[tuple[float, int, int], float] | None = None  # as last asked for
    _changes: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._waiting or key in self._expected

    @property
    def expected(self) -> Collection[RequestKey]:
        return self._expected.keys()

    @property
    def queued(self) -> Collection[RequestKey]:
        return self._waiting.keys()

    def expect(self, prompt: Queued) -> None:
        assert prompt.key not in self, f"{prompt.key} waits here already"
        self._expected[prompt.key] = prompt
        self._changes += 1
        before_s = self._seconds.get(prompt.priority, 0.0)
        self._seconds[prompt.priority] = before_s + prompt.seconds

    def add(
        self, key: RequestKey, *, held_tokens: int, within_s: float | None, now_s: float
    ) -> None:
        """It is certain now."""
        prompt = self._expected.pop(key)
        prompt.held_tokens, prompt.within_s, prompt.since_s = held_tokens, within_s, now_s
        self._waiting[key] = prompt
        self.order.add(prompt, now_s)

    def remove(self, key: RequestKey) -> None:
        """Removing what isn't here changes nothing."""
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self.order.remove(waiting)
        prompt = waiting or self._expected.pop(key, None)
        if prompt is not None:
            self._changes += 1
            self._seconds[prompt.priority] -= prompt.seconds
            if not self._expected and not self._waiting:
                self._seconds.clear()  # and with it what rounding left

    def in_order(self, now_s: float) -> Iterator[Queued]:
        """Those that wait; may be left at any point."""
        return self.order.order(now_s)

    def given(self, prompt: Queued, *, workers: int, now_s: float) -> None:
        """One of so many workers has it: that share of all their time will be its tier's."""
        self.remove(prompt.key)
        self.order.ran([(prompt, prompt.remaining)], prompt.seconds / workers, now_s)

    def starts_in_s(self, priority: int, busy_s: Iterable[float], now_s: float) -> float:
        """When a new prompt's turn comes, with workers that are busy for so long (read once for
        all questions of a moment): as soon as they have taken all that goes before it."""
        asked = (now_s, priority, self._changes)
        if self._level is None or self._level[0] != asked:
            before_s = sum(s for other, s in self._seconds.items() if other <= priority)
            self._level = asked, level(max(0.0, before_s), busy_s)
        return self._level[1]

    def validate(self) -> None:
        self.order.validate(self._waiting.values())
        assert not self._expected.keys() & self._waiting.keys()


def level(work_s: float, busy_s: Iterable[float]) -> float:
    """When workers that are busy for so long have taken `work_s` more, each as soon as it is free;
    0 without any."""
    ascending = sorted(busy_s)
    if not ascending:
        return 0.0
    level_s = ascending[0]
    for workers, next_s in enumerate([*ascending[1:], inf], 1):
        if work_s <= workers * (next_s - level_s):
            return level_s + work_s / workers
        work_s -= workers * (next_s - level_s)
        level_s = next_s
    return level_s


@dataclass(frozen=True, slots=True)
class AnyPrefillWorker:
    """Implements `engine.core.step_times.StepTimes`, for prompts whose worker isn't known yet."""

    workers: Workers

    def step_s(self, work: StepWork) -> float:
        for view in self.workers.values():
            if view.prefills:
                return view.step_s(work)
        raise NotCovered("there is no prefill worker")


class DispatchWay(NamedTuple):
    """A prompt at a worker: done in so many seconds, of which it waits some."""

    done_s: float
    prompt: PromptPrediction
    candidate: Candidate
    worker: WorkerView


class Turn(NamedTuple):
    """The prompt that is next, and the worker that gets it."""

    queued: Queued
    request: Request
    demand: Demand
    way: DispatchWay


@dataclass(frozen=True, slots=True)
class SharedQueueDispatch:
    """Implements `router.core.router_state.Dispatch`. Prompts that decode workers compute don't
    wait here."""

    workers: Workers
    queue: SharedQueue

    @property
    def waiting(self) -> int:
        return len(self.queue)

    @property
    def expected(self) -> Collection[RequestKey]:
        return self.queue.expected

    @property
    def queued(self) -> Collection[RequestKey]:
        return self.queue.queued

    def turn_in_s(self, priority: int, now_s: float) -> float:
        busy_s = (wait_s(view, inf, now_s) for view in self.workers.values() if view.prefills)
        return self.queue.starts_in_s(priority, busy_s, now_s)

    def expect(self, request: Request, demand: Demand, admitted: Admitted) -> bool:
        if admitted.candidate.prefill is None:
            return False
        prompt = admitted.prediction.prompt
        seconds = prompt.pull_s + prompt.prefill_s
        self.queue.expect(Queued(spec=demand.spec, seconds=seconds, priority=demand.priority))
        return True

    def keep(self, request: Request, held_tokens: int, now_s: float) -> bool:
        if request.key not in self.queue:
            return False
        within_s = request.within_s(now_s)
        self.queue.add(request.key, held_tokens=held_tokens, within_s=within_s, now_s=now_s)
        return True

    def forget(self, key: RequestKey) -> None:
        self.queue.remove(key)

    def stranded(self, state: RouterState, now_s: float) -> list[Request]:
        queued = [one for one in state.requests.values() if one.key in self.queue]
        demands = ((one, demand_of(state, one, one.spec, now_s)) for one in queued)
        return [one for one, demand in demands if not self._fitting(demand)]

    def _fitting(self, demand: Demand) -> list[WorkerView]:
        return fitting((view for view in self.workers.values() if view.prefills), demand)

    def validate(self) -> None:
        self.queue.validate()

    # --- giving ---------------------------------------------------------------------------------

    def give(self, state: RouterState, now_s: float) -> list[Command]:
        commands: list[Command] = []
        while self.queue and (turn := self._next(state, now_s)) is not None:
            workers = sum(view.prefills for view in self.workers.values())
            self.queue.given(turn.queued, workers=workers, now_s=now_s)
            commands += _send(turn, now_s)
        return commands

    def _next(self, state: RouterState, now_s: float) -> Turn | None:
        """The first in order that one of the free workers is to have."""
        if not any(is_free(view) for view in self.workers.values()):
            return None
        looked_at = 0
        for queued in self.queue.in_order(now_s):
            request = state.requests[queued.key.request_id]
            demand = demand_of(state, request, request.spec, now_s)
            workers = self._least_suspected(state, request, demand, now_s)
            if not any(map(is_free, workers)):
                continue
            ways = [_at(state, request, demand, worker, now_s) for worker in workers]
            if (way := _best(queued, ways, now_s)) is not None:
                return Turn(queued, request, demand, way)
            looked_at += 1
            if looked_at == LOOKED_AT:
                return None
        return None

    def _least_suspected(
        self, state: RouterState, request: Request, demand: Demand, now_s: float
    ) -> list[WorkerView]:
        """Of all prefill workers: a suspected one waits until no other could have it."""
        assert request.placed is not None
        decode = request.placed.candidate.decode.incarnation
        quarantine = state.quarantine
        fitting = [
            (quarantine.objection(Pair(view.incarnation, decode), request.avoided, now_s)[0], view)
            for view in self._fitting(demand)
        ]
        least = min((against for against, _ in fitting), default=0)
        return [view for against, view in fitting if against == least]


def _at(
    state: RouterState, request: Request, demand: Demand, worker: WorkerView, now_s: float
) -> DispatchWay:
    assert request.placed is not None
    source = demand.held.source(state.workers, worker)
    candidate = replace(request.placed.candidate, prefill=worker, source=source)
    prompt = state.forecast.prompt(demand, candidate, now_s)
    waits_s = worker.queue.wait_s(demand.priority, now_s)
    return DispatchWay(waits_s + prompt.pull_s + prompt.prefill_s, prompt, candidate, worker)


def _send(turn: Turn, now_s: float) -> list[Command]:
    request, way = turn.request, turn.way
    request.send_prompt_to(way.candidate, now_s)
    book_prefill(turn.demand, way.worker, way.prompt, now_s)
    return lifecycle.send_prompt(request, way.candidate, turn.queued.held_tokens, now_s)


def open_shared_queue(workers: Workers, tiers: QosTiers) -> SharedQueueDispatch:
    order: Order[Queued] = Order(qos=tiers, times=AnyPrefillWorker(workers))
    return SharedQueueDispatch(workers, SharedQueue(order=order))


def _best(queued: Queued, ways: list[DispatchWay], now_s: float) -> DispatchWay | None:
    """The free worker that is done with it first; None: one that isn't free yet, but has more of it
    cached, is done sooner. For that it waits no longer than it saves."""
    free = min((way for way in ways if is_free(way.worker)), key=_done_s)
    saves_s = free.done_s - min(map(_done_s, ways))
    return free if now_s - queued.since_s >= saves_s else None


def _done_s(way: DispatchWay) -> float:
    return way.done_s


def is_free(worker: WorkerView) -> bool:
    """What it has left is no more than its next step takes."""
    if not worker.prefills or worker.draining or worker.suspect:
        return False
    others = max(0, worker.counters.prefill_waiting_tokens - worker.queue.tokens)
    return worker.queue.left_tokens + others <= worker.chunk_tokens
