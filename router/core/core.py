"""Follows every request from submission to its last token. Pure; one per router.

    submitted -> reserving -> (Reserved) admitted -> tokens ... -> finished
                    `-> (ReserveRefused) next decode worker, or refused

A request whose worker fails goes on elsewhere under the next attempt, each of its choices behind
the tokens delivered; draws are counter based.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import InitVar, dataclass, field
from itertools import count

from kvrelay.messages import (
    Lifetime,
    PromptLogprobs,
    Released,
    RequestFailed,
    Reserved,
    ReserveRefused,
    Tokens,
    WorkerEvent,
)
from kvrelay.qos import ONE_TIER, QosTiers
from kvrelay.types import Incarnation, RequestSpec
from router.core import dispatch as orders
from router.core.decision import Deciding
from router.core.dispatch import Dispatch, OpenDispatch, open_direct
from router.core.events import (
    Aborted,
    Admit,
    ChoiceStopped,
    Command,
    DeadlinePassed,
    Event,
    LadderStepped,
    PoolNodeLost,
    PoolNodeSaid,
    Rejected,
    Submitted,
    WorkerJoined,
    WorkerLost,
    WorkerSaid,
)
from router.core.lifecycle import (
    Delivering,
    Ending,
    Learning,
    Legs,
    Refusing,
    Seeking,
    suspect,
    trust,
)
from router.core.load.output_lengths import OutputLengths
from router.core.migration import Moves, OpenMoves, no_moves
from router.core.policy.admission import AdmissionPolicy
from router.core.policy.forecast import Forecast, open_forecast
from router.core.policy.kv_aware import KvAware
from router.core.policy.placement import PlacementPolicy
from router.core.policy.predictive import Predictive
from router.core.request import Ledger, Request
from router.core.state.directory import Directory
from router.core.state.generation import GenerationRequest
from router.core.state.ladder import Ladders
from router.core.state.promises import DRAINING, NO_CAPACITY, Promises, refused_by_worker
from router.core.state.quarantine import Quarantine, RecentPairs
from router.core.state.story import Moment, Story, StoryRing, held, plain
from router.core.state.waiting import WaitingRoom
from router.core.state.worker_view import WorkerView
from router.core.workers import Workers

_LAST = (Released, ReserveRefused)
"""Of a request at a worker."""
PLACING = KvAware()
ADMITTING = Predictive()


@dataclass(slots=True)
class RouterCore:
    """`attempts` numbers the tries of all requests: a request id may come again, or at another
    router, while a worker still holds the earlier one, so routers start at different numbers."""

    attempts: Iterator[int] = field(default_factory=count)
    preloads: tuple[RequestSpec, ...] = ()
    tiers: QosTiers = ONE_TIER
    placing: InitVar[PlacementPolicy] = PLACING
    admitting: InitVar[AdmissionPolicy] = ADMITTING
    open_dispatch: InitVar[OpenDispatch] = open_direct
    open_moves: InitVar[OpenMoves] = no_moves
    lengths: OutputLengths = field(default_factory=OutputLengths)
    promises: Promises = field(default_factory=Promises)
    forecast: Forecast = field(init=False)
    ladders: Ladders = field(init=False)
    deciding: Deciding = field(init=False)
    refusing: Refusing = field(init=False)
    learning: Learning = field(init=False)
    dispatch: Dispatch = field(init=False)
    legs: Legs = field(init=False)
    moving: Moves = field(init=False)
    seeking: Seeking = field(init=False)
    ending: Ending = field(init=False)
    delivering: Delivering = field(init=False)
    workers: Workers = field(default_factory=Workers)
    requests: dict[str, Request] = field(default_factory=dict)
    directory: Directory = field(default_factory=Directory)
    waiting: WaitingRoom = field(default_factory=WaitingRoom)
    quarantine: Quarantine = field(default_factory=Quarantine)
    recent_pairs: RecentPairs = field(default_factory=RecentPairs)
    stories: StoryRing = field(default_factory=StoryRing)
    local_prefills: int = 0  # prompts that decode workers took, though there are others for that

    def __post_init__(
        self,
        placing: PlacementPolicy,
        admitting: AdmissionPolicy,
        open_dispatch: OpenDispatch,
        open_moves: OpenMoves,
    ) -> None:
        self.dispatch = open_dispatch(self.workers, self.tiers)
        self.forecast = open_forecast(self.workers, self.dispatch.turn_in_s, self.lengths)
        self.ladders = Ladders(self.tiers)
        self.refusing = Refusing(promises=self.promises, workers=self.workers)
        self.learning = Learning(
            workers=self.workers, lengths=self.lengths, ladders=self.ladders, forecast=self.forecast
        )
        self.deciding = Deciding(
            placing=placing,
            admitting=admitting,
            workers=self.workers,
            requests=self.requests,
            directory=self.directory,
            lengths=self.lengths,
            promises=self.promises,
            waiting=self.waiting,
            quarantine=self.quarantine,
            ladders=self.ladders,
            forecast=self.forecast,
            tiers=self.tiers,
        )
        self.legs = Legs(workers=self.workers, dispatch=self.dispatch)
        self.moving = open_moves(self.deciding, self.legs, self.attempts)
        self.seeking = Seeking(
            deciding=self.deciding,
            dispatch=self.dispatch,
            refusing=self.refusing,
            waiting=self.waiting,
            workers=self.workers,
            requests=self.requests,
            stories=self.stories,
        )
        self.ending = Ending(
            requests=self.requests,
            legs=self.legs,
            seeking=self.seeking,
            refusing=self.refusing,
            attempts=self.attempts,
        )
        self.delivering = Delivering(
            workers=self.workers, learning=self.learning, ending=self.ending
        )

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Raises Rejected for what a worker should not have said, PeerError for an update of a pool
        node that another should have come before."""
        return [
            *self._handle(event, now_s),
            *self.seeking.ask_again(now_s),
            *self.dispatch.give(self.deciding, now_s),
            *self._climb(now_s),
        ]

    def _handle(self, event: Event, now_s: float) -> list[Command]:
        match event:
            case WorkerSaid():
                return self._worker_said(event, now_s)
            case Submitted(request=submitted):
                return self._submitted(submitted, now_s)
            case ChoiceStopped():
                return self.ending.stopped(event, now_s)
            case Aborted(request_id=request_id):
                return self.ending.aborted(request_id, now_s)
            case DeadlinePassed(request_id=request_id):
                return self.ending.too_late(request_id, now_s)
            case WorkerJoined(hello=hello):
                self.workers.join(hello)
                self.waiting.wake(now_s)
                return orders.preload(hello, self.preloads)
            case WorkerLost(incarnation=incarnation):
                return self._worker_lost(incarnation, now_s)
            case PoolNodeSaid(update=update):
                self.directory.updated(update)
                return []
            case PoolNodeLost(node=node):
                self.directory.lost(node)
                return []

    def _submitted(self, submitted: GenerationRequest, now_s: float) -> list[Command]:
        assert submitted.request_id not in self.requests, f"{submitted.request_id} runs already"
        ledger = Ledger(before_s=submitted.phases_s, submitted_s=now_s)
        tier = self.tiers[submitted.qos_tier]
        request = Request(
            submitted=submitted, tier=tier, ledger=ledger, attempt=next(self.attempts)
        )
        request.promise = self.promises.claim(request.digest, now_s)
        self.requests[request.request_id] = request
        return self.seeking.place(request, NO_CAPACITY, now_s)

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
        running_before = view.counters.running
        view.said(said.counters)
        for changes in said.blocks:
            self.directory.changed(said.incarnation, changes)
        commands = self._all_said(view, said.events, now_s)
        ended = any(isinstance(event, Released) for event in said.events)
        if not view.prefills and (ended or said.counters.running < running_before):
            self.waiting.wake(now_s)
        return [*commands, *self.moving.relieve(view, now_s)]

    def _all_said(
        self, view: WorkerView, events: Iterable[WorkerEvent], now_s: float
    ) -> list[Command]:
        """Raises Rejected."""
        commands: list[Command] = []
        for event in events:
            try:
                commands += self._one_said(view, event, now_s)
            except Exception as error:
                raise Rejected(event, error, commands) from error
        return commands

    def _one_said(self, view: WorkerView, event: WorkerEvent, now_s: float) -> list[Command]:
        if isinstance(event, _LAST):
            view.forget(event.key, now_s)
        if isinstance(event, ReserveRefused):
            view.draining |= event.reason == DRAINING.reason
        if (answered := self.moving.answered(event, now_s)) is not None:
            return answered
        request = self.requests.get(event.key.request_id)
        if request is None or request.key != event.key or view.incarnation not in request.legs:
            return []
        match event:
            case Tokens():
                return self.delivering.said(request, view, event, now_s)
            case Reserved(held_tokens=held_tokens):
                return self._reserved(request, held_tokens, now_s)
            case ReserveRefused(reason=reason) if not request.decodes_at(view.incarnation):
                return self.ending.sent_back(request, refused_by_worker(reason), now_s)
            case ReserveRefused(reason=reason):
                request.story.note(Moment.TURNED_DOWN, now_s, request.decoder, plain(reason))
                self.legs.forget(request, now_s)
                return self.seeking.place(request, refused_by_worker(reason), now_s)
            case Lifetime():
                request.lived(event)
                view.queue.lived(event)
                if event.name == "handoff_committed":
                    self.recent_pairs.used(request.links(), now_s)
                return [*trust(self.quarantine, request, event)]
            case PromptLogprobs():
                request.scored(event)
                return []
            case RequestFailed(reason=reason, message=message):
                suspected = suspect(self.quarantine, request, event, now_s)
                return [*suspected, *self.ending.leg_failed(request, reason, message, now_s)]
            case Released():
                return []

    def _reserved(self, request: Request, held_tokens: int, now_s: float) -> list[Command]:
        request.ledger.mark("reserved", now_s)
        there = held(held_tokens) if held_tokens else ""
        request.story.note(Moment.RESERVED, now_s, request.decoder, there)
        self.learning.reserved(request, now_s)
        self.waiting.leave(request.request_id)
        self.local_prefills += request.ledger.is_local
        begin = self.dispatch.reserved(request, held_tokens, now_s)
        if request.admitted:
            return begin
        request.admitted = True
        self.forecast.prompts.saw(request.spec.context_tokens)
        if request.promise is not None:
            self.promises.settle(kept=True)
        return [Admit(request_id=request.request_id), *begin]

    def _worker_lost(self, incarnation: Incarnation, now_s: float) -> list[Command]:
        view = self.workers.leave(incarnation)
        self.directory.lost(incarnation)
        if view is None:
            return []
        self.quarantine.forget(incarnation)
        self.recent_pairs.forget(incarnation)
        self.moving.lost(incarnation, now_s)
        affected = [one for one in self.requests.values() if incarnation in one.legs]
        affected += self.dispatch.stranded(self.deciding, now_s) if view.prefills else []
        message = f"worker {view.hello.name} was lost"
        return [
            command
            for request in affected
            for command in self.ending.leg_failed(request, "worker_lost", message, now_s)
        ]

    def stories_of(self, asked: str) -> list[Story]:
        """What happened to the requests that a client knows as `asked`, in their order."""
        return self.stories.find(asked, (one.story for one in self.requests.values()))

    def validate(self) -> None:
        """A request waits, or is with workers that are here."""
        assert all(name in self.requests for name in self.waiting)
        self.dispatch.validate()
        for request in self.requests.values():
            assert all(leg in self.workers for leg in request.legs), f"{request.key} is nowhere"
            assert request.placement or request.request_id in self.waiting, f"{request.key}"
