"""When an admitted prompt goes to a prefill worker, and to which. Pure; part of a router's core.

direct          to the one that it was placed with, as soon as its decode worker has taken it
shared_queue    to one that has less than about a chunk left to compute, in the order of the queue;
                of several such workers to the one that is done first
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.latency import NotCovered, StepWork
from engine.prompts.order import Order
from kvrelay.qos import QosTiers
from router import orders
from router.admitting.policy import Admitted
from router.candidate import Candidate, PromptPrediction
from router.deciding import Deciding
from router.demand import Demand
from router.events import Command
from router.placement import Pair
from router.request import Request
from router.shared_queue import Queued, SharedQueue
from router.view import WorkerView
from router.workers import Workers, fitting

LOOKED_AT = 8
"""Of the queue, in its order, of those that a free worker could have."""


@dataclass(frozen=True, slots=True)
class AnyPrefillWorker:
    """Implements `engine.latency.StepTimes`, for prompts whose worker isn't known yet."""

    workers: Workers

    def step_s(self, work: StepWork) -> float:
        for view in self.workers.values():
            if view.prefills:
                return view.step_s(work)
        raise NotCovered("there is no prefill worker")


def open_queue(tiers: QosTiers, workers: Workers) -> SharedQueue:
    return SharedQueue(order=Order(qos=tiers, times=AnyPrefillWorker(workers)))


class Way(NamedTuple):
    """A prompt at a worker: done in so many seconds, of which it waits some."""

    done_s: float
    prompt: PromptPrediction
    candidate: Candidate
    worker: WorkerView


@dataclass(slots=True, kw_only=True)
class Dispatching:
    """`queue` None: direct. `local_prefills` counts the prompts that decode workers have taken."""

    deciding: Deciding
    queue: SharedQueue | None = None
    local_prefills: int = 0

    def place(
        self, request: Request, demand: Demand, admitted: Admitted, now_s: float
    ) -> list[Command]:
        """Its decode worker is asked."""
        request.place(admitted, now_s)
        candidate = admitted.candidate
        for worker in candidate.workers if admitted.doubted else ():
            worker.doubt.tried(now_s)
        if self.queue is None or candidate.prefill is None:
            self.deciding.workers.book(demand, admitted, now_s)
            return [orders.ask(request.spec, admitted, request.within_s(now_s))]
        self.deciding.workers.book_decode(demand, admitted, now_s)
        prompt = admitted.prediction.prompt
        seconds = prompt.pull_s + prompt.prefill_s
        self.queue.expect(Queued(spec=demand.spec, seconds=seconds, priority=demand.priority))
        request.is_queued = True
        return [orders.reserve(request.spec, candidate.decode, None, admitted.counted)]

    def reserved(self, request: Request, held_tokens: int, now_s: float) -> list[Command]:
        """Its decode worker has taken it."""
        assert request.placed is not None
        self.local_prefills += request.prefilled_locally
        within_s = request.within_s(now_s)
        if self.queue is None or not request.is_queued:
            return orders.begin(request, request.placed.candidate, held_tokens, within_s)
        self.queue.add(request.key, held_tokens=held_tokens, within_s=within_s, now_s=now_s)
        return []

    def forget(self, request: Request) -> None:
        """It waits no more."""
        if self.queue is not None:
            self.queue.remove(request.key)

    def stranded(self, now_s: float) -> list[Request]:
        """Those that no prefill worker could take any more."""
        queued = [one for one in self.deciding.requests.values() if one.is_queued and one.placed]
        demands = ((one, self.deciding.demand(one, one.spec, now_s)) for one in queued)
        return [one for one, demand in demands if not self._fitting(demand)]

    def _fitting(self, demand: Demand) -> list[WorkerView]:
        workers = self.deciding.workers.values()
        return fitting((one for one in workers if one.prefills), demand)

    # --- giving ---------------------------------------------------------------------------------

    def give(self, now_s: float) -> list[Command]:
        """To all workers that are about to be free."""
        commands: list[Command] = []
        while self.queue and (found := self._next(self.queue, now_s)) is not None:
            queued, request, demand, way = found
            workers = sum(view.prefills for view in self.deciding.workers.values())
            self.queue.given(queued, workers=workers, now_s=now_s)
            commands += self._send(queued, request, demand, way, now_s)
        return commands

    def _next(self, queue: SharedQueue, now_s: float) -> tuple[Queued, Request, Demand, Way] | None:
        """The first in order that one of the free workers is to have."""
        if not any(is_free(view) for view in self.deciding.workers.values()):
            return None
        looked_at = 0
        for queued in queue.in_order(now_s):
            request = self.deciding.requests[queued.key.request_id]
            demand = self.deciding.demand(request, request.spec, now_s)
            workers = self._least_suspected(request, demand, now_s)
            if not any(map(is_free, workers)):
                continue
            ways = [self._at(request, demand, worker, now_s) for worker in workers]
            if (way := self._best(queued, ways, now_s)) is not None:
                return queued, request, demand, way
            looked_at += 1
            if looked_at == LOOKED_AT:
                return None
        return None

    @staticmethod
    def _best(queued: Queued, ways: list[Way], now_s: float) -> Way | None:
        """The free worker that is done with it first; None: one that isn't free yet, but has more
        of it cached, is done sooner. For that it waits no longer than it saves."""
        free = min((way for way in ways if is_free(way.worker)), key=_done_s)
        saves_s = free.done_s - min(map(_done_s, ways))
        return free if now_s - queued.since_s >= saves_s else None

    def _least_suspected(self, request: Request, demand: Demand, now_s: float) -> list[WorkerView]:
        """Of all prefill workers: who is suspected waits until no other could have it."""
        assert request.placement is not None
        decode, quarantine = request.placement.decode, self.deciding.quarantine
        fitting = [
            (quarantine.objection(Pair(view.incarnation, decode), request.avoided, now_s)[0], view)
            for view in self._fitting(demand)
        ]
        least = min((against for against, _ in fitting), default=0)
        return [view for against, view in fitting if against == least]

    def _at(self, request: Request, demand: Demand, worker: WorkerView, now_s: float) -> Way:
        assert request.placed is not None
        source = demand.held.source(self.deciding.workers, worker)
        candidate = replace(request.placed.candidate, prefill=worker, source=source)
        prompt = self.deciding.forecast.prompt(demand, candidate, now_s)
        waits_s = worker.queue.wait_s(demand.priority, now_s)
        return Way(waits_s + prompt.pull_s + prompt.prefill_s, prompt, candidate, worker)

    def _send(
        self, queued: Queued, request: Request, demand: Demand, way: Way, now_s: float
    ) -> list[Command]:
        assert request.placed is not None
        request.placed = replace(request.placed, candidate=way.candidate)
        request.is_queued = False
        request.ledger.mark("dispatched", now_s)
        self.deciding.workers.book_prefill(demand, way.worker, way.prompt, now_s)
        within_s = request.within_s(now_s)
        return orders.begin(request, way.candidate, queued.held_tokens, within_s)


def _done_s(way: Way) -> float:
    return way.done_s


def is_free(worker: WorkerView) -> bool:
    """What it has left is no more than its next step takes."""
    if not worker.prefills or worker.draining:
        return False
    others = max(0, worker.counters.prefill_waiting_tokens - worker.queue.tokens)
    return worker.queue.left_tokens + others <= worker.hello.prefill_chunk_tokens
