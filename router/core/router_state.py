"""All that a router's core knows, in one object, and the laws that hold between its tables. Pure.

Every request is in exactly one state. Every slot at a worker, queue entry, waiting-room entry,
claimed promise and pending move belongs to exactly one request, whose state fits. Three things
outlive the request or the attempt that they belong to:

- a slot, until its worker says Released (`WorkerView.unreleased`);
- a pending move, until its target answers: then the target is told to stop, and its slot is freed
  by Released too;
- the waiting-room entry of a request that asks a worker: it keeps its turn until Reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Protocol

from kvrelay.messages import WorkerEvent
from kvrelay.qos import ONE_TIER, QosTiers
from kvrelay.types import Incarnation, RequestKey, RequestSpec
from router.core.events import Command
from router.core.faults.poison import SUSPECTED, WAITS, SuspectRequests
from router.core.load.output_lengths import OutputLengths
from router.core.policy.admission import AdmissionPolicy, Admitted
from router.core.policy.forecast import Forecast, at_once, open_forecast
from router.core.policy.kv_aware import KvAware
from router.core.policy.placement import PlacementPolicy
from router.core.policy.predictive import Predictive
from router.core.promises.promises import Promises, ReleaseClock
from router.core.promises.returning import Returning
from router.core.request import Request, RequestState
from router.core.state.demand import Demand
from router.core.state.directory import Directory
from router.core.state.ladder import Ladders
from router.core.state.offered import OfferedLoad, PrefilledByPool
from router.core.state.quarantine import Quarantine, RecentPairs
from router.core.state.story import Story, StoryRing
from router.core.state.waiting import FAILOVER_PATIENCE_S, WaitingRoom
from router.core.state.worker_view import WorkerView
from router.core.workers import Workers


class Dispatch(Protocol):
    """When an admitted prompt goes to a prefill worker, and to which."""

    @property
    def waiting(self) -> int:
        """The number of prompts that wait at the router."""

    @property
    def expected(self) -> Collection[RequestKey]:
        """Prompts that will wait here once their decode worker has said Reserved."""

    @property
    def queued(self) -> Collection[RequestKey]:
        """Prompts that wait at the router."""

    @property
    def turn_in_s(self) -> Callable[[int, float], float]:
        """(priority, now) |-> seconds until a new prompt would leave the router"""

    def expect(self, request: Request, demand: Demand, admitted: Admitted) -> bool:
        """Its decode worker is asked. Returns whether its prompt will wait at the router."""

    def keep(self, request: Request, held_tokens: int, now_s: float) -> bool:
        """Its decode worker has taken it. Returns whether its prompt waits at the router now."""

    def forget(self, key: RequestKey) -> None:
        """Its prompt waits here no more, if it did."""

    def stranded(self, state: RouterState, now_s: float) -> list[Request]:
        """The requests whose prompts wait here and that no prefill worker could take any more."""

    def give(self, state: RouterState, now_s: float) -> list[Command]:
        """Sends prompts to all workers that are about to be free."""

    def validate(self) -> None: ...


class Direct:
    """A prompt goes to the worker that it was placed with, as soon as its decode worker has taken
    it."""

    waiting = 0
    expected: Collection[RequestKey] = ()
    queued: Collection[RequestKey] = ()
    turn_in_s: Callable[[int, float], float] = staticmethod(at_once)

    def expect(self, request: Request, demand: Demand, admitted: Admitted) -> bool:
        return False

    def keep(self, request: Request, held_tokens: int, now_s: float) -> bool:
        return False

    def forget(self, key: RequestKey) -> None:
        return

    def stranded(self, state: RouterState, now_s: float) -> list[Request]:
        return []

    def give(self, state: RouterState, now_s: float) -> list[Command]:
        return []

    def validate(self) -> None:
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A request that decodes as `left` at `source` and is to go on as `spec`. `admitted` names the
    target that was asked. `led_away`: the source drains."""

    left: RequestKey
    source: Incarnation
    spec: RequestSpec
    admitted: Admitted
    led_away: bool = False


class MoveCause(StrEnum):
    """Why a request left its worker, which lives."""

    LEAVING = "leaving"
    HOT_SPOT = "hot_spot"


class Moves(Protocol):
    """Moves of requests that decode. `pending`: # key of the new attempt |-> move."""

    @property
    def hot_spots(self) -> bool:
        """Workers that do not drain are to be relieved too."""

    @property
    def pending(self) -> Mapping[RequestKey, Move]: ...

    @property
    def moved(self) -> Mapping[MoveCause, int]:
        """How many requests were taken by their target."""

    def relieve(self, state: RouterState, view: WorkerView, now_s: float) -> list[Command]:
        """The worker has reported its load: some requests may leave it."""

    def answered(self, state: RouterState, event: WorkerEvent, now_s: float) -> list[Command]:
        """The target of a pending move has answered."""

    def lost(self, state: RouterState, worker: Incarnation, now_s: float) -> None: ...


class NoMoves:
    """Not even away from workers that drain."""

    hot_spots = False
    moved: Mapping[MoveCause, int] = {}
    pending: Mapping[RequestKey, Move] = {}

    def relieve(self, state: RouterState, view: WorkerView, now_s: float) -> list[Command]:
        return []

    def answered(self, state: RouterState, event: WorkerEvent, now_s: float) -> list[Command]:
        return []

    def lost(self, state: RouterState, worker: Incarnation, now_s: float) -> None:
        return


@dataclass(slots=True, kw_only=True)
class RouterState:
    """Owns the tables of a router. Functions get it as one argument; nobody keeps a table of it,
    but for the forecast and the shared queue, which read `workers`.

    `attempts` numbers the attempts of all requests: a request id may come again, or at another
    router, while a worker still holds the earlier one. So routers start at different numbers.
    """

    attempts: Iterator[int] = field(default_factory=count)
    tiers: QosTiers = ONE_TIER
    placing: PlacementPolicy = field(default_factory=KvAware)
    admitting: AdmissionPolicy = field(default_factory=Predictive)
    dispatch: Dispatch = field(default_factory=Direct)
    moves: Moves = field(default_factory=NoMoves)
    workers: Workers = field(default_factory=Workers)
    requests: dict[str, Request] = field(default_factory=dict)
    waiting: WaitingRoom = field(default_factory=WaitingRoom)
    directory: Directory = field(default_factory=Directory)
    promises: Promises = field(default_factory=Promises)
    returning: Returning = field(default_factory=Returning)
    releases: ReleaseClock = field(default_factory=ReleaseClock)
    quarantine: Quarantine = field(default_factory=Quarantine)
    recent_pairs: RecentPairs = field(default_factory=RecentPairs)
    suspects: SuspectRequests = field(default_factory=SuspectRequests)
    lengths: OutputLengths = field(default_factory=OutputLengths)
    offered: OfferedLoad = field(default_factory=OfferedLoad)
    prefilled: PrefilledByPool = field(default_factory=PrefilledByPool)
    forecast: Forecast = field(init=False)
    ladders: Ladders = field(init=False)
    stories: StoryRing = field(default_factory=StoryRing)
    local_prefills: int = 0  # prompts that decode workers took beside the prefill workers
    failover_patience_s: float = FAILOVER_PATIENCE_S

    def __post_init__(self) -> None:
        self.forecast = open_forecast(self.workers, self.dispatch.turn_in_s, self.lengths)
        self.ladders = Ladders(self.tiers)

    def stories_of(self, asked: str) -> list[Story]:
        """What happened to the requests that a client knows as `asked`, in their order."""
        return self.stories.find(asked, (one.story for one in self.requests.values()))

    # --- the laws, between events ---------------------------------------------------------------

    def validate(self) -> None:
        """No event is being handled: no request is SEEKING."""
        for request_id, request in self.requests.items():
            assert request_id == request.request_id
            self._check_state(request)
        self._check_waiting()
        self._check_queue()
        self._check_promises()
        self._check_suspects()
        for view in self.workers.values():
            self._check_slots(view)
        for key, move in self.moves.pending.items():
            self._check_move(key, move)

    def _check_state(self, request: Request) -> None:
        """What a request must hold in its state."""
        key, state, needed = request.key, request.state, request.workers
        assert state not in (RequestState.SEEKING, RequestState.GONE), f"{key} is {state}"
        waits = state in (RequestState.WAITING, RequestState.HELD)
        assert bool(needed) is not waits, f"{key} is {state} with {needed}"
        assert all(worker in self.workers for worker in needed), (
            f"{key} is at a worker that has left"
        )
        if state in (RequestState.ASKED, RequestState.QUEUED) and request.sampling.max_tokens:
            assert key in self.workers[needed[0]].outlook, f"{key} is {state} without a slot"

    def _check_waiting(self) -> None:
        self.waiting.validate()
        waits = {one.request_id for one in self._in(RequestState.WAITING)}
        assert {*self.waiting.due()} == waits, f"{waits} wait, but not in the waiting room"
        for request_id in self.waiting:
            request = self.requests.get(request_id)
            assert request is not None, f"{request_id} waits and is gone"
            if request_id not in waits:
                assert request.state is RequestState.ASKED, f"{request_id} is {request.state}"

    def _check_queue(self) -> None:
        self.dispatch.validate()
        queued = {one.key for one in self._in(RequestState.QUEUED)}
        assert queued == {*self.dispatch.queued}, f"{queued} are queued, but not in the queue"
        asked = {one.key for one in self._in(RequestState.ASKED)}
        assert asked >= {*self.dispatch.expected}, "a prompt is expected of nobody who was asked"

    def _check_promises(self) -> None:
        """Each claim is kept, broken or given up once."""
        self.promises.validate()
        self.returning.validate()
        claims = sum(one.promise is not None for one in self.requests.values())
        assert claims == self.promises.claimed, f"{claims} of {self.promises.claimed} claims"

    def _check_suspects(self) -> None:
        """Those that wait for their turn are HELD, and nobody else is. Suspects run alone."""
        self.suspects.validate(self.requests.keys())
        held = {one.request_id for one in self._in(RequestState.HELD)}
        assert held == {*self.suspects.of(*WAITS)}, f"{held} are held"
        alone = {one.request_id for one in self.requests.values() if one.alone}
        assert alone == {*self.suspects.of(*SUSPECTED)}, f"{alone} run alone"

    def _check_slots(self, view: WorkerView) -> None:
        """Whose they are: a request's, a pending move's, or of one that has left."""
        for key in view.outlook:
            owners = [self._has_slot(key, view), self._moves_to(key, view), key in view.unreleased]
            assert sum(owners) == 1, f"{key} has a slot at {view.incarnation}: {owners}"
        for key in view.queue:
            owners = [self._prefills(key, view), self._moves_from(key, view)]
            owners.append(key in view.unreleased)
            assert sum(owners) == 1, f"{key} is in the queue of {view.incarnation}: {owners}"
        for key in view.unreleased:
            assert key in view.outlook or key in view.queue, f"{key} holds nothing any more"

    def _has_slot(self, key: RequestKey, view: WorkerView) -> bool:
        request = self.requests.get(key.request_id)
        return request is not None and request.key == key and view.incarnation == request.workers[0]

    def _prefills(self, key: RequestKey, view: WorkerView) -> bool:
        """Its prompt was sent there, or will be. After a handoff that sampled no token there, it
        counts as DECODING only with the decode worker's first one, so that state fits too."""
        request = self.requests.get(key.request_id)
        if request is None or request.key != key or request.placed is None:
            return False
        states = (RequestState.ASKED, RequestState.PREFILLING, RequestState.DECODING)
        prefiller = request.prefill_worker or request.workers[0]
        return request.state in states and prefiller == view.incarnation

    def _moves_to(self, key: RequestKey, view: WorkerView) -> bool:
        move = self.moves.pending.get(key)
        return move is not None and move.admitted.candidate.decode.incarnation == view.incarnation

    def _moves_from(self, key: RequestKey, view: WorkerView) -> bool:
        move = self.moves.pending.get(key)
        return move is not None and move.source == view.incarnation

    def _check_move(self, key: RequestKey, move: Move) -> None:
        """The request that is to move decodes, or has left: then its target hasn't answered."""
        request = self.requests.get(key.request_id)
        if request is not None and request.key == move.left:
            assert request.state is RequestState.DECODING, f"{request.state} {key} is to move"
        target = move.admitted.candidate.decode.incarnation
        assert target in self.workers, f"{key} is to move to {target}, which has left"

    def _in(self, state: RequestState) -> Iterator[Request]:
        return (one for one in self.requests.values() if one.state is state)
