"""The router's shell: turns the core's commands into messages, and their answers into events.

Lives in one event loop. A request's handle is a queue that the core's deliveries fill.

One request that runs on the workers, as the faces follow it. Lives in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from secrets import randbits
from typing import Protocol
from uuid import uuid4

from kvrelay.access.values import NO_ACCESS, Access
from kvrelay.counters import Counters
from kvrelay.errors import FailureReason, InvalidRequest, Refused, RequestFailedError
from kvrelay.messages import BlockChanges, RouterLeaving, WorkerEvent, WorkerHello
from kvrelay.qos import ONE_TIER, QosTiers
from kvrelay.types import Incarnation, PromptLogprob, RequestSpec
from router.core.decision import appraise
from router.core.events import (
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
    Rejected,
    Send,
    Submitted,
    TimePassed,
    WorkerEnded,
    WorkerJoined,
    WorkerLost,
    WorkerSaid,
    WorkerSuspected,
)
from router.core.faults.silence import DETECT_S, PERIOD_S, Silence
from router.core.policy.choice import DEFAULT_POLICIES, Policies
from router.core.promises.refusal import Refusal
from router.core.request import Request
from router.core.start import Beginning, begin
from router.core.state.directory import DIRECTORY_BYTES
from router.core.state.generation import ChoiceTokens, GenerationRequest, RefusedUntil
from router.core.state.story import bare_id
from router.core.state.waiting import FAILOVER_PATIENCE_S
from router.core.state.worker_view import check_joins
from router.live import status
from router.live.link import WorkerLink
from router.live.pool_nodes import PoolNodes
from router.live.recorder import Recorder
from router.live.status import ClusterViews, RecentActivity
from router.live.witness import ask_witness

log = logging.getLogger(__name__)


MAX_UNREAD_TOKENS = 4096
"""So many tokens may wait for a client that reads slowly. With more, its request is aborted."""
MAX_UNREAD_OF_CHOICE = 256
"""A request of many choices may have so many waiting for each, if that is more."""


MOST_IN_A_TURN = 32
"""After so many tokens that were waiting, the loop's other tasks have their turn."""


class GenerationOwner(Protocol):
    """Whose it is: the dispatcher."""

    def runs(self, generation: WorkerGeneration) -> bool: ...

    def stop(self, request_id: str, choice: int, valid_tokens: int) -> None: ...

    def abort(self, request_id: str) -> None: ...


class WorkerGeneration:
    """A request on the workers. What it yields comes in index order, each token once."""

    def __init__(
        self, owner: GenerationOwner, request_id: str, n: int = 1, qos_tier: str = ""
    ) -> None:
        self.request_id = request_id
        self.qos_tier = qos_tier
        self.unread_tokens = 0
        self._most_unread = max(MAX_UNREAD_TOKENS, MAX_UNREAD_OF_CHOICE * n)
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.request: Request | None = None
        self.alarm: asyncio.TimerHandle | None = None  # rings when its deadline passes
        self._owner = owner
        self._deliveries: asyncio.Queue[Deliver | Fail | None] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[ChoiceTokens]:
        taken = 0
        try:
            while (delivery := await self._deliveries.get()) is not None:
                if isinstance(delivery, Fail):
                    raise RequestFailedError(delivery.reason, delivery.message)
                self.unread_tokens -= _tokens_in(delivery)
                for tokens in delivery.tokens:
                    yield tokens
                    taken += 1
                    if taken % MOST_IN_A_TURN == 0:
                        await asyncio.sleep(0)
                if delivery.done:
                    return
        finally:
            self.abort()

    def stop(self, choice: int, valid_tokens: int) -> None:
        if self._owner.runs(self):
            self._owner.stop(self.request_id, choice, valid_tokens)

    def abort(self) -> None:
        if self._owner.runs(self):  # the id may be another request's by now
            self._owner.abort(self.request_id)

    def ledger(self) -> dict[str, float]:
        return self.request.ledger.phases() if self.request is not None else {}

    def prediction_errors(self) -> dict[str, float]:
        return self.request.prediction_errors() if self.request is not None else {}

    @property
    def cached_tokens(self) -> int:
        return self.request.cached_tokens if self.request is not None else 0

    @property
    def prompt_logprobs(self) -> Sequence[PromptLogprob]:
        return self.request.prompt_logprobs if self.request is not None else ()

    @property
    def capped_tokens(self) -> int | None:
        return self.request.capped_tokens if self.request is not None else None

    def put(self, delivery: Deliver | Fail | None) -> None:
        if isinstance(delivery, Deliver):
            self.unread_tokens += _tokens_in(delivery)
            if self.unread_tokens > self._most_unread and not delivery.done:
                self._give_up()
                return
        self._deliveries.put_nowait(delivery)

    def _give_up(self) -> None:
        """Its client doesn't read. What waits is dropped, and its KV is freed."""
        message = (
            f"{self.unread_tokens} tokens were waiting for the client, and at most "
            f"{self._most_unread} may: read the stream faster, or ask for fewer tokens"
        )
        self.unread_tokens = 0
        while not self._deliveries.empty():
            self._deliveries.get_nowait()
        failure = FailureReason.SLOW_READER
        self.put(Fail(request_id=self.request_id, reason=failure, message=message))
        asyncio.get_running_loop().call_soon(self.abort)


MAX_REQUEST_ID_BYTES = 256
"""It stands in every message between workers, and these are at most 64 KiB."""


def _tokens_in(delivery: Deliver) -> int:
    return sum(len(tokens.token_ids) for tokens in delivery.tokens)


class WorkerDispatcher(ClusterViews):
    """Implements `router.core.state.generation.Dispatcher` over real workers."""

    def __init__(
        self,
        preloads: tuple[RequestSpec, ...] = (),
        policies: Policies = DEFAULT_POLICIES,
        tiers: QosTiers = ONE_TIER,
        *,
        directory_bytes: int = DIRECTORY_BYTES,
        failover_patience_s: float = FAILOVER_PATIENCE_S,
        detect_s: float = DETECT_S,
        record: Callable[[Beginning], Recorder] | None = None,
        access: Access = NO_ACCESS,
    ) -> None:
        """`record` opens a file for all that the core hears and decides. `access`: to workers and
        pool nodes."""
        beginning = Beginning(
            first_attempt=randbits(30),  # of 32 bits on the wire
            seed=randbits(62),
            policies=policies,
            tiers=tiers,
            preloads=preloads,
            directory_bytes=directory_bytes,
            failover_patience_s=failover_patience_s,
        )
        super().__init__(begin(beginning), PoolNodes(self._post, access))
        self._access = access
        self._recorder = record(beginning) if record is not None else None
        self.incarnation = Incarnation(uuid4().hex)
        self._links: dict[str, WorkerLink] = {}  # address |-> link
        self._generations: dict[str, WorkerGeneration] = {}
        self._silence = Silence(now_s=time.monotonic(), detect_s=detect_s)
        self._leaves = False
        self._watching: asyncio.Task[None] | None = None  # from the first worker on
        self._asking: set[asyncio.Task[None]] = set()  # how workers have ended

    # --- workers --------------------------------------------------------------------------------

    def add_worker(self, address: str) -> WorkerLink:
        if address not in self._links:
            link = WorkerLink(address, self.incarnation, self, self._access)
            self._links[address] = link
        return self._links[address]

    async def remove_worker(self, address: str) -> None:
        link = self._links.pop(address, None)
        if link is not None:
            await link.close()

    async def close(self) -> None:
        for address in list(self._links):
            await self.remove_worker(address)
        for task in (self._watching, *self._asking):
            if task is not None:
                task.cancel()
        await self.pools.close()
        if self._recorder is not None:
            self._recorder.close()

    def leave(self) -> None:
        self._leaves = True
        for link in self.attached.values():
            link.send(RouterLeaving())

    def joined(self, link: WorkerLink, hello: WorkerHello) -> None:
        check_joins(hello, self.hellos())
        log.info("worker %s joined: %s on %s", hello.name, hello.role, hello.device)
        if hello.is_new:
            self.starts.note(hello.start)
        self.attached[hello.incarnation] = link
        if self._leaves:
            link.send(RouterLeaving())
        self.recent[hello.incarnation] = RecentActivity(hello.total_blocks)
        self._silence.joined(hello.incarnation)
        self._begin_watching()
        self._post_of_workers(WorkerJoined(hello=hello))

    def said(
        self,
        worker: Incarnation,
        events: tuple[WorkerEvent, ...],
        counters: Counters,
        blocks: tuple[BlockChanges, ...],
    ) -> None:
        self._silence.heard(worker)
        if (recent := self.recent.get(worker)) is not None:
            recent.heard(counters, time.monotonic())
        said = WorkerSaid(incarnation=worker, events=events, counters=counters, blocks=blocks)
        self._post(said)

    def lost(
        self,
        worker: Incarnation,
        reason: str,
        *,
        was_silent: bool = False,
        was_rejected: bool = False,
    ) -> None:
        view = self.core.state.workers.get(worker)
        asked = view is not None and bool(view.hello.witness) and not was_rejected
        link = self.attached.pop(worker, None)
        self.recent.pop(worker, None)
        self._silence.left(worker)
        if link is not None:
            if link.address in self._links and not (view is not None and view.draining):
                log.warning("lost the worker at %s: %s", link.address, reason)
            else:
                log.info("the worker at %s has left", link.address)
            event = WorkerLost(
                incarnation=worker, was_silent=was_silent, was_rejected=was_rejected, asked=asked
            )
            self._post_of_workers(event)
            if view is not None and asked:
                self._ask_how_it_ended(view.hello)

    def _ask_how_it_ended(self, hello: WorkerHello) -> None:
        task = asyncio.ensure_future(self._hear_how_it_ended(hello))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _hear_how_it_ended(self, hello: WorkerHello) -> None:
        ending = await ask_witness(hello)
        before = self.core.state.suspects.suspected
        self._post(WorkerEnded(incarnation=hello.incarnation, ending=ending))
        status.tell_ending(hello, ending, self.core.state.suspects.suspected - before)

    def _post_of_workers(self, event: WorkerJoined | WorkerLost) -> None:
        workers = self.core.state.workers
        before = workers.missing
        try:
            self._post(event)
        finally:
            status.tell_stand_ins(before, workers)

    def _begin_watching(self) -> None:
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        """The links' own pings are answered by threads that live on when a worker hangs."""
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                self._look(time.monotonic())
            except Exception:
                log.exception("silent workers were not handled well")

    def _look(self, now_s: float) -> None:
        suspects, lost = self._silence.look(now_s)
        for worker in suspects:
            log.warning("worker %s is suspect: it has reported nothing lately", self._name(worker))
            self._post(WorkerSuspected(incarnation=worker))
        for worker in lost:
            link = self.attached[worker]
            link.hang_up()
            reason = f"it has reported nothing for {self._silence.detect_s:g} s"
            self.lost(worker, reason, was_silent=True)
        state = self.core.state
        if state.suspects.cases or (state.waiting and not state.workers):
            self._post(TimePassed())

    def _name(self, worker: Incarnation) -> str:
        return self.core.state.workers.name_of(worker)

    # --- requests -------------------------------------------------------------------------------

    async def submit(self, request: GenerationRequest) -> WorkerGeneration:
        if request.delivered and request.admitted:
            self.abort(request.request_id)  # its client is not there any more
        self._check(request)
        tier = self.core.state.tiers[request.qos_tier].name
        generation = WorkerGeneration(self, request.request_id, request.sampling.n, tier)
        self._generations[request.request_id] = generation
        self._post(Submitted(request=request))
        generation.request = self.core.state.requests.get(request.request_id)
        self._watch_deadline(generation, request)
        if request.admitted:
            self._begin_watching()
        try:
            await generation.admitted
        except BaseException:
            generation.abort()
            raise
        return generation

    def appraise(self, request: GenerationRequest) -> Refused | None:
        refusal = appraise(self.core.state, request, time.monotonic())
        return None if refusal is None else _error_of(refusal)

    def block_size(self) -> int:
        views = self.core.state.workers.values()
        return max((view.hello.block_size for view in views), default=0)

    def _watch_deadline(self, generation: WorkerGeneration, request: GenerationRequest) -> None:
        deadline_s = request.objectives.deadline_s
        if deadline_s is not None and generation.request is not None:
            left_s = deadline_s - sum(request.phases_s.values())
            loop = asyncio.get_running_loop()
            passed = DeadlinePassed(request_id=request.request_id)
            generation.alarm = loop.call_later(max(0.0, left_s), self._post, passed)

    def _check(self, request: GenerationRequest) -> None:
        """Raises InvalidRequest for what no worker could take, even when idle."""
        sent = bare_id(request.request_id)
        if len(sent.encode()) > MAX_REQUEST_ID_BYTES:
            raise InvalidRequest(
                f"request_id has more than {MAX_REQUEST_ID_BYTES} bytes: choose a shorter one",
                param="request_id",
            )
        if request.request_id in self.core.state.requests:
            raise InvalidRequest(
                f"request id {sent} is running already: choose another",
                code="duplicate_request_id",
                param="request_id",
            )
        places = self.core.state.workers.most_places
        if places and request.sampling.n > places:
            raise InvalidRequest(
                f"n is {request.sampling.n}, but a worker runs at most {places} sequences "
                "at once: ask for fewer choices",
                param="n",
            )

    def runs(self, generation: WorkerGeneration) -> bool:
        return self._generations.get(generation.request_id) is generation

    def stop(self, request_id: str, choice: int, valid_tokens: int) -> None:
        stopped = ChoiceStopped(request_id=request_id, choice=choice, valid_tokens=valid_tokens)
        self._post(stopped)
        self._end_if_gone(request_id)

    def abort(self, request_id: str) -> None:
        if request_id in self.core.state.requests:
            self._post(Aborted(request_id=request_id))
        self._end_if_gone(request_id)

    def _end_if_gone(self, request_id: str) -> None:
        if request_id not in self.core.state.requests and request_id in self._generations:
            self._forget(request_id).put(None)

    # --- commands -------------------------------------------------------------------------------

    def _post(self, event: Event) -> None:
        now_s = time.monotonic()
        try:
            commands = self.core.handle(event, now_s)
        except Rejected as rejected:
            self._execute_all(rejected.commands)
            raise
        if self._recorder is not None:
            self._recorder.heard(event, commands, now_s)
        self._execute_all(commands)

    def _execute_all(self, commands: Iterable[Command]) -> None:
        for command in commands:
            self._execute(command)

    def _execute(self, command: Command) -> None:
        match command:
            case Send(worker=worker, message=message):
                link = self.attached.get(worker)
                if link is not None:
                    link.send(message)
            case Deliver(request_id=request_id, done=done):
                self._generation(request_id, done=done).put(command)
            case Admit(request_id=request_id):
                generation = self._generations[request_id]
                self.counts.admitted[generation.qos_tier] += 1
                self._settle_admission(generation, None)
            case Refuse(request_id=request_id, refusal=refusal):
                generation = self._generation(request_id, done=True)
                self.counts.refused[generation.qos_tier] += 1
                self._settle_admission(generation, _error_of(refusal))
            case Fail(request_id=request_id):
                generation = self._generation(request_id, done=True)
                failure = RequestFailedError(command.reason, command.message)
                self._settle_admission(generation, failure)
                generation.put(command)
            case PairQuarantined() | PairTrusted():
                status.tell_quarantine(command, self.core.state.workers)
            case LadderStepped():
                status.tell_ladder_steps(command)

    def _generation(self, request_id: str, *, done: bool) -> WorkerGeneration:
        return self._forget(request_id) if done else self._generations[request_id]

    def _forget(self, request_id: str) -> WorkerGeneration:
        generation = self._generations.pop(request_id)
        if generation.alarm is not None:
            generation.alarm.cancel()
        return generation

    @staticmethod
    def _settle_admission(generation: WorkerGeneration, error: Exception | None) -> None:
        if generation.admitted.done():
            return
        if error is None:
            generation.admitted.set_result(None)
        else:
            generation.admitted.set_exception(error)


def _error_of(refusal: Refusal) -> Refused:
    if refusal.promise is not None:
        return RefusedUntil(refusal.reason, refusal.message, told=refusal.promise)
    return Refused(refusal.reason, refusal.message, retry_after_s=refusal.retry_after_s)
