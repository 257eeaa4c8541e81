"""Moves of requests that decode from one worker to another. Pure.

Long sequences leave a worker before it overflows, as in TetriInfer (arXiv:2401.11181 §3.4). A
worker is a hot spot if its sequences will, at their fullest moment, have more blocks than there
are, or need longer for a step than the strictest of their objectives. Sequences leave until it is
below its low mark, for workers that stay below theirs. Between the marks nothing moves.

    decodes -> Reserve at the target, still decodes -> (Reserved) aborted here, resumed there
                                           `-> (ReserveRefused) decodes on

The worker that a sequence leaves prefills the new attempt: it has the KV of all full blocks in its
cache. Tokens that it samples between Reserve and Reserved are not sampled again.

All that decode leave a worker that drains, in the same way, for any worker that has room; the
choices of a request leave together. Their prompt's KV is handed over once. What each has emitted
since is computed anew at the target, so they don't leave a hot spot. Prompts that were not begun
where they would be prefilled, or decoded, go elsewhere by `lead_away`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from kvrelay.messages import Abort, Reserved, WorkerEvent
from kvrelay.types import Incarnation, RequestKey, RequestSpec, Role
from router.core import lifecycle
from router.core.decision import demand_of
from router.core.events import Command, Send, ask_for_slot
from router.core.policy.admission import Admitted
from router.core.promises.refusal import DRAINING
from router.core.request import Request, RequestState
from router.core.router_state import Move, MoveCause, RouterState
from router.core.state.candidate import Candidate, Prediction
from router.core.state.quarantine import Pair
from router.core.state.worker_view import WorkerView
from router.core.workers import book_decode, book_prefill

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
HIGH, LOW = 1.0, 0.9
"""Shares of a worker's blocks, and of its objective for a step."""
LEAVING_AT_ONCE = 8
LEAVE_LOOK_S = 0.02
"""A worker that drains: at most so many at a time, looked for so often."""
LEAD_LOOK_S = 0.1
"""Between two looks at what else it holds up."""
FEWEST_LEFT_TOKENS = 32
"""One that ends sooner isn't worth its handoff."""
MOST_SINCE_TOKENS = 4096
"""The commit of a move has so many tokens at most, to fit a notification."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """A sequence with a context of `tokens` now, which yields `left_tokens` more. The KV of the
    first `shared_tokens` is another choice's too, which counts their blocks."""

    request_id: str
    tokens: int
    left_tokens: int
    shared_tokens: int = 0
    may_move: bool = True

    @property
    def own_tokens(self) -> int:
        return self.tokens - self.shared_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """What decodes at a worker. `other_blocks` are held there for others than `sequences`."""

    worker: WorkerView
    sequences: Sequence[Decoding]
    other_blocks: int = 0

    def without(self, one: Decoding) -> WorkerLoad:
        kept = [other for other in self.sequences if other is not one]
        return WorkerLoad(worker=self.worker, sequences=kept, other_blocks=self.other_blocks)

    def beside(self, *more: Decoding) -> WorkerLoad:
        sequences = [*self.sequences, *more]
        return WorkerLoad(worker=self.worker, sequences=sequences, other_blocks=self.other_blocks)

    def share(self) -> float:
        """Of the blocks, or of the strictest objective, whichever is nearer to its end."""
        hello, objective_s = self.worker.hello, self.worker.outlook.strictest_tpot_s
        tokens, sequences = fullest(self.sequences)
        own = max(0, tokens - sum(one.shared_tokens for one in self.sequences))
        blocks = self.other_blocks + own / hello.block_size + sequences
        if objective_s is None:
            return blocks / hello.total_blocks
        step_s = self.worker.decode_s(sequences, tokens)
        return max(blocks / hello.total_blocks, step_s / objective_s)


@dataclass(slots=True)
class Moving:
    """Implements `router.core.router_state.Moves`. Without `hot_spots`, only a worker that drains
    is left."""

    hot_spots: bool = True
    moved: dict[MoveCause, int] = field(default_factory=lambda: dict.fromkeys(MoveCause, 0))
    pending: dict[RequestKey, Move] = field(default_factory=dict)
    _looked_s: dict[Incarnation, float] = field(default_factory=dict)

    def relieve(self, state: RouterState, view: WorkerView, now_s: float) -> list[Command]:
        """Asks the targets of the requests that are to leave it; they decode on meanwhile."""
        if view.draining:
            wanted = self._leaving(state, view, now_s)
        else:
            wanted = self._wanted(state, view, now_s)
        return [
            command
            for request, target in wanted
            for command in self._begin(state, request, view, target, now_s)
        ]

    def _leaving(
        self, state: RouterState, view: WorkerView, now_s: float
    ) -> list[tuple[Request, WorkerView]]:
        """Of a worker that drains: all that decode, the longest first, as far as there is room."""
        if now_s < self._looked_s.get(view.incarnation, -inf) + LEAVE_LOOK_S:
            return []
        self._looked_s[view.incarnation] = now_s
        most = LEAVING_AT_ONCE - sum(m.source == view.incarnation for m in self.pending.values())
        leaving = [one for one in self._decoding(state, view) if one.may_move]
        if most <= 0 or not leaving:
            return []
        leaving.sort(key=lambda one: one.left_tokens, reverse=True)
        together: dict[str, list[Decoding]] = {}
        for one in leaving:
            together.setdefault(one.request_id, []).append(one)
        targets = _open(state, view)

        def may_go(request: Request, target: WorkerView) -> bool:
            return _is_trusted(state, view, target, now_s, request.avoided)

        groups = ((state.requests[name], choices) for name, choices in together.items())
        loads = [self._load(state, target) for target in targets]
        return [*_spread(groups, loads, may_go, most)]

    def _wanted(
        self, state: RouterState, view: WorkerView, now_s: float
    ) -> list[tuple[Request, WorkerView]]:
        """Who is to go where."""
        if not self._is_due(view, now_s):
            return []
        self._looked_s[view.incarnation] = now_s
        load = self._load(state, view)
        most = MOST_MOVING - sum(m.source == view.incarnation for m in self.pending.values())
        trusted = [one for one in _targets(state, view) if _is_trusted(state, view, one, now_s)]
        targets = [self._load(state, target) for target in trusted]
        moves = suggest(load, targets, most)
        return [(state.requests[one.request_id], target) for one, target in moves]

    def _is_due(self, view: WorkerView, now_s: float) -> bool:
        if _taken_blocks(view) < PRESSED * view.hello.total_blocks:
            return False
        return now_s >= self._looked_s.get(view.incarnation, -LOOK_S) + LOOK_S

    def _load(self, state: RouterState, view: WorkerView) -> WorkerLoad:
        """Of other routers' sequences only the number of their blocks is known."""
        sequences = [*self._decoding(state, view)]
        own = sum(-(-one.own_tokens // view.hello.block_size) for one in sequences)
        others = max(0, _taken_blocks(view) - own)
        return WorkerLoad(worker=view, sequences=sequences, other_blocks=others)

    def _decoding(self, state: RouterState, view: WorkerView) -> Iterator[Decoding]:
        for key in view.outlook:
            request = state.requests.get(key.request_id)
            if request is None or key not in (request.key, *self.pending):
                continue
            may_move = self._may_move(request, view)
            prompt, shared = len(request.submitted.prompt_ids), 0
            for order in request.choices:
                if order.finished:
                    continue
                emitted, most = order.next_index, request.sampling.max_tokens
                length = state.lengths.quantile(
                    request.tier.name, 0.5, max_tokens=most, emitted=emitted
                )
                yield Decoding(
                    request_id=request.request_id,
                    tokens=prompt + emitted,
                    left_tokens=max(0, length - emitted),
                    shared_tokens=shared,
                    may_move=may_move,
                )
                shared = prompt

    def _may_move(self, request: Request, view: WorkerView) -> bool:
        off_hot_spot = len(request.choices) == 1 and request.moves < MOST_MOVES
        free = (view.draining or off_hot_spot) and not request.alone
        decodes = request.state is RequestState.DECODING
        here = decodes and request.workers == (view.incarnation,)
        return free and here and all(m.left != request.key for m in self.pending.values())

    # --- a move's life --------------------------------------------------------------------------

    def _begin(
        self,
        state: RouterState,
        request: Request,
        source: WorkerView,
        target: WorkerView,
        now_s: float,
    ) -> list[Command]:
        if not _is_trusted(state, source, target, now_s, request.avoided):
            return []
        spec = request.next_spec(next(state.attempts))
        demand = demand_of(state, request, spec, now_s)
        candidate = Candidate(decode=target, prefill=source)
        prediction = state.forecast.predict(demand, candidate, now_s)
        if not (source.draining or _is_worth(prediction, demand.output_tokens)):
            return []
        admitted = Admitted(candidate=candidate, prediction=prediction)
        self.pending[spec.key] = Move(
            left=request.key,
            source=source.incarnation,
            spec=spec,
            admitted=admitted,
            led_away=source.draining,
        )
        book_decode(demand, admitted, now_s)
        book_prefill(demand, source, prediction.prompt, now_s)
        return [ask_for_slot(state.workers, demand, admitted, None)]

    def answered(self, state: RouterState, event: WorkerEvent, now_s: float) -> list[Command]:
        """Nothing changes where the target refuses, or the request went on otherwise."""
        move = self._take(state, event.key, now_s)
        target = move.admitted.candidate.decode
        request = state.requests.get(event.key.request_id)
        if not isinstance(event, Reserved):
            target.await_release(event.key)
            return []
        if request is None or request.key != move.left or _is_too_late(request, move.spec):
            target.await_release(event.key)
            return [Send(worker=target.incarnation, message=Abort(key=event.key))]
        self.moved[MoveCause.LEAVING if move.led_away else MoveCause.HOT_SPOT] += 1
        return lifecycle.go_on_at(state, request, move, event.held_tokens, now_s)

    def _take(self, state: RouterState, key: RequestKey, now_s: float) -> Move:
        """The work that it would have made for its source is not booked any more."""
        move = self.pending.pop(key)
        if move.source in state.workers:
            state.workers[move.source].queue.remove(key, now_s)
        return move

    def lost(self, state: RouterState, worker: Incarnation, now_s: float) -> None:
        """Moves to it come to nothing."""
        for key, move in [*self.pending.items()]:
            if move.admitted.candidate.decode.incarnation == worker:
                self._take(state, key, now_s)
        self._looked_s.pop(worker, None)


def _is_too_late(request: Request, spec: RequestSpec) -> bool:
    """Too many tokens were emitted since the target was asked."""
    known = sum(len(spec.emitted_ids) + len(spec.resumed_by(c.choice)) for c in request.choices)
    return sum(c.next_index for c in request.choices) - known > MOST_SINCE_TOKENS


def _open(state: RouterState, source: WorkerView) -> list[WorkerView]:
    """The other workers that decode and have a place."""
    return [
        view
        for view in state.workers.values()
        if view is not source
        and not (view.prefills or view.draining or view.suspect)
        and view.free_places > 0
    ]


def _is_trusted(
    state: RouterState,
    source: WorkerView,
    target: WorkerView,
    now_s: float,
    avoided: Collection[Pair] = (),
) -> bool:
    """Handoffs between the two did not fail lately."""
    pair = Pair(source.incarnation, target.incarnation)
    return not state.quarantine.objection(pair, avoided, now_s)[0]


def _targets(state: RouterState, source: WorkerView) -> list[WorkerView]:
    others = [
        view
        for view in _open(state, source)
        if _taken_blocks(view) < PRESSED * view.hello.total_blocks
    ]
    free = sorted(others, key=lambda v: v.hello.total_blocks - _taken_blocks(v), reverse=True)
    return free[:MOST_TARGETS]


def _taken_blocks(view: WorkerView) -> int:
    counters = view.counters
    return counters.active_blocks + counters.leased_blocks


def _is_worth(prediction: Prediction, left_tokens: int) -> bool:
    """So it is where the workers haven't told their times."""
    decode = prediction.decode
    return not decode.step_s or decode.joins_in_s < WORTH * left_tokens * decode.step_s


# --- which of them --------------------------------------------------------------------------------


def fullest(sequences: Iterable[Decoding]) -> tuple[int, int]:
    """The most tokens that they will have at once, each growing by one a step until it ends, and
    how many sequences have them."""
    longest_first = sorted(sequences, key=lambda one: one.left_tokens, reverse=True)
    sums = accumulate(one.tokens for one in longest_first)
    moments = zip(sums, enumerate(longest_first, 1), strict=True)
    return max(((now + n * one.left_tokens, n) for now, (n, one) in moments), default=(0, 0))


def suggest(
    load: WorkerLoad, targets: Sequence[WorkerLoad], most: int
) -> list[tuple[Decoding, WorkerView]]:
    """At most so many moves, longest sequences first; none while the worker will not overflow."""
    if load.share() <= HIGH:
        return []
    moves: list[tuple[Decoding, WorkerView]] = []
    room = list(targets)
    for one in sorted(load.sequences, key=lambda one: one.tokens, reverse=True):
        if len(moves) == most or load.share() <= LOW:
            break
        if not one.may_move or one.left_tokens < FEWEST_LEFT_TOKENS:
            continue
        target = _roomiest(one, room)
        if target is not None:
            moves.append((one, target.worker))
            room = [t.beside(one) if t is target else t for t in room]
            load = load.without(one)
    return moves


def _roomiest(one: Decoding, targets: Sequence[WorkerLoad]) -> WorkerLoad | None:
    shares = [(target.beside(one).share(), at) for at, target in enumerate(targets)]
    share, at = min(shares, default=(LOW, 0))
    return targets[at] if share < LOW else None


MayGo = Callable[[Request, WorkerView], bool]


def _spread(
    leaving: Iterable[tuple[Request, Sequence[Decoding]]],
    targets: Sequence[WorkerLoad],
    may_go: MayGo,
    most: int,
) -> Iterator[tuple[Request, WorkerView]]:
    """Each to the target that is least loaded then, among those with a place for all its choices;
    at most so many are tried."""
    loads, places = [*targets], [target.worker.free_places for target in targets]
    tried = 0
    for request, choices in leaving:
        needed = len(request.choices)
        after = {
            at: load.beside(*choices)
            for at, load in enumerate(loads)
            if places[at] >= needed and may_go(request, load.worker)
        }
        if not after:
            continue
        if tried == most:
            return
        tried += 1
        share, at = min((one.share(), at) for at, one in after.items())
        if share <= HIGH:
            yield request, loads[at].worker
            loads[at] = after[at]
            places[at] -= needed


# --- the rest of what a worker that drains would hold up ------------------------------------------


def lead_away(state: RouterState, view: WorkerView, now_s: float) -> list[Command]:
    if now_s < view.led_away_s + LEAD_LOOK_S:
        return []
    view.led_away_s = now_s
    commands: list[Command] = []
    for request in [*state.requests.values()]:
        if _is_held_up(state, request, view):  # beside those that were led away just now
            commands += lifecycle.place_elsewhere(state, request, DRAINING, now_s)
    return commands


def _is_held_up(state: RouterState, request: Request, view: WorkerView) -> bool:
    """It would wait for this worker, and another one could take it."""
    if view.incarnation not in request.workers or request.alone:
        return False
    match request.state:
        case RequestState.QUEUED:
            return _has_other(state, request, view)
        case RequestState.PREFILLING:
            return not _has_begun(state, request) and _has_other(state, request, view)
        case _:
            return False


def _has_begun(state: RouterState, request: Request) -> bool:
    """The prefill of its prompt, or of what it decoded before it left this worker."""
    assert request.placed is not None
    prefiller = state.workers.get(request.placed.candidate.prefiller.incarnation)
    return prefiller is None or prefiller.queue.has_begun(request.key) or request.leaving


def _has_other(state: RouterState, request: Request, view: WorkerView) -> bool:
    """For its prompt and for its answer, with room for all choices at once."""
    choices = len(request.choices)
    others = [one for one in state.workers.values() if one is not view and _takes(one)]
    decodes = [one for one in others if not one.prefills and one.free_places >= choices]
    prefills = any(one.role is not Role.DECODE for one in others)
    return bool(decodes) and (prefills or state.workers.decode_alone)


def _takes(view: WorkerView) -> bool:
    return not (view.draining or view.suspect)
