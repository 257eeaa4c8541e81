"""Moves of requests that decode from one worker to another. Pure; part of a router's core.

    decodes -> Reserve at the target, still decodes -> (Reserved) aborted here, resumed there
                                           `-> (ReserveRefused) decodes on

The worker that it leaves prefills the new attempt: it has the KV of all full blocks in its cache.
What it says between Reserve and Reserved is not drawn again: the prefill says what it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kvrelay.messages import Abort, Reserved, WorkerEvent
from kvrelay.types import Incarnation, RequestKey, RequestSpec, Role
from router import orders
from router.admitting.policy import Admitted
from router.candidate import Candidate, Prediction
from router.deciding import Deciding
from router.events import Command, Send
from router.hot_spots import Decoding, Load, suggest
from router.legs import Legs
from router.placement import Pair
from router.request import Request
from router.view import WorkerView

PRESSED = 0.7
"""A worker with fewer of its blocks taken is not looked at."""
LOOK_S = 0.25
"""Between two looks at one worker."""
MOST_MOVING = 2
"""From one worker at a time."""
MOST_MOVES = 2
"""Of one request."""
MOST_TARGETS = 4
"""That are looked at: those with the most free blocks."""
WORTH = 0.25
"""A move may pause a request for this share of the time that it still takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What `left` runs at `source` so far."""

    left: RequestKey
    source: Incarnation
    spec: RequestSpec
    admitted: Admitted


@dataclass(slots=True)
class Moving:
    """`moved` counts those whose target has taken them."""

    deciding: Deciding
    legs: Legs
    attempts: Iterator[int]
    enabled: bool = False
    moved: int = 0
    _pending: dict[RequestKey, Move] = field(default_factory=dict)
    _looked_s: dict[Incarnation, float] = field(default_factory=dict)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._pending

    def relieve(self, view: WorkerView, now_s: float) -> list[Command]:
        """Asks the targets of those that are to leave it; they decode on meanwhile."""
        if not self.enabled:
            return []
        return [
            command
            for request, target in self._wanted(view, now_s)
            for command in self._begin(request, view, target, now_s)
        ]

    def _wanted(self, view: WorkerView, now_s: float) -> list[tuple[Request, WorkerView]]:
        """Who is to go where."""
        if not self._is_due(view, now_s):
            return []
        self._looked_s[view.incarnation] = now_s
        load = self._load(view)
        most = MOST_MOVING - sum(m.source == view.incarnation for m in self._pending.values())
        targets = [self._load(target) for target in self._targets(view)]
        moves = suggest(load, targets, most)
        return [(self.deciding.requests[one.request_id], target) for one, target in moves]

    def _is_due(self, view: WorkerView, now_s: float) -> bool:
        """One that drains ends with what it has, perhaps before it had handed that over."""
        if view.draining or _taken_blocks(view) < PRESSED * view.hello.total_blocks:
            return False
        return now_s >= self._looked_s.get(view.incarnation, -LOOK_S) + LOOK_S

    def _targets(self, source: WorkerView) -> list[WorkerView]:
        others = [
            view
            for view in self.deciding.workers.values()
            if view is not source
            and view.hello.role is not Role.PREFILL
            and not view.draining
            and view.free_places > 0
            and _taken_blocks(view) < PRESSED * view.hello.total_blocks
        ]
        free = sorted(others, key=lambda v: v.hello.total_blocks - _taken_blocks(v), reverse=True)
        return free[:MOST_TARGETS]

    def _load(self, view: WorkerView) -> Load:
        """Of other routers' sequences nothing is known but their blocks."""
        sequences = [*self._decoding(view)]
        own = sum(-(-one.tokens // view.hello.block_size) for one in sequences)
        others = max(0, _taken_blocks(view) - own)
        return Load(worker=view, sequences=sequences, other_blocks=others)

    def _decoding(self, view: WorkerView) -> Iterator[Decoding]:
        for key in view.outlook:
            request = self.deciding.requests.get(key.request_id)
            if request is None or key not in (request.key, *self._pending):
                continue
            for order in request.choices:
                emitted, most = order.next_index, request.sampling.max_tokens
                length = self.deciding.lengths.quantile(
                    request.tier.name, 0.5, max_tokens=most, emitted=emitted
                )
                yield Decoding(
                    request_id=request.request_id,
                    tokens=len(request.submitted.prompt_ids) + emitted,
                    left_tokens=max(0, length - emitted),
                    may_move=self._may_move(request, view),
                )

    def _may_move(self, request: Request, view: WorkerView) -> bool:
        alone = len(request.choices) == 1 and request.moves < MOST_MOVES
        here = request.legs == (view.incarnation,) and request.decodes
        return alone and here and all(m.left != request.key for m in self._pending.values())

    # --- a move's life --------------------------------------------------------------------------

    def _begin(
        self, request: Request, source: WorkerView, target: WorkerView, now_s: float
    ) -> list[Command]:
        pair = Pair(source.incarnation, target.incarnation)
        if self.deciding.quarantine.objection(pair, request.avoided, now_s)[0]:
            return []
        spec = self._spec(request)
        demand = self.deciding.demand(request, spec, now_s)
        candidate = Candidate(decode=target, prefill=source)
        prediction = self.deciding.forecast.predict(demand, candidate, now_s)
        if not _is_worth(prediction, demand.output_tokens):
            return []
        admitted = Admitted(candidate=candidate, prediction=prediction)
        self._pending[spec.key] = Move(
            left=request.key, source=source.incarnation, spec=spec, admitted=admitted
        )
        self.deciding.workers.book(demand, admitted, now_s)
        return [orders.ask(spec, admitted, None)]

    def _spec(self, request: Request) -> RequestSpec:
        """Of its next attempt, behind all that it has delivered."""
        key = RequestKey(request.request_id, next(self.attempts))
        emitted = tuple(request.choices[0].delivered)
        return replace(request.spec, key=key, emitted_ids=emitted, resumed=())

    def answered(self, event: WorkerEvent, now_s: float) -> list[Command]:
        """Nothing changes where the target refuses, or the request went on otherwise."""
        move = self._take(event.key, now_s)
        if not isinstance(event, Reserved):
            return []
        request = self.deciding.requests.get(event.key.request_id)
        candidate = move.admitted.candidate
        if request is None or request.key != move.left:
            return [Send(worker=candidate.decode.incarnation, message=Abort(key=event.key))]
        aborts = self.legs.abort(request, now_s)
        self.legs.forget(request, now_s)
        request.move(move.spec)
        request.place(move.admitted, now_s)
        self.moved += 1
        return [*aborts, *orders.begin(request, candidate, event.held_tokens, None)]

    def _take(self, key: RequestKey, now_s: float) -> Move:
        """What it would have kept its source busy with is not booked any more."""
        move = self._pending.pop(key)
        if move.source in self.deciding.workers:
            self.deciding.workers[move.source].queue.remove(key, now_s)
        return move

    def lost(self, worker: Incarnation, now_s: float) -> None:
        """Nothing comes of the moves to it."""
        for key, move in [*self._pending.items()]:
            if move.admitted.candidate.decode.incarnation == worker:
                self._take(key, now_s)
        self._looked_s.pop(worker, None)


def _taken_blocks(view: WorkerView) -> int:
    counters = view.counters
    return counters.active_blocks + counters.leased_blocks


def _is_worth(prediction: Prediction, left_tokens: int) -> bool:
    """So it is where the workers haven't told their times."""
    decode = prediction.decode
    return not decode.step_s or decode.joins_in_s < WORTH * left_tokens * decode.step_s
