"""Decides what a prefill worker does next. Pure; one per worker.

    awaiting_prefill -> prefilling -> handing_over -> (Committed) gone

Pieces of a prompt's KV are sent while the rest of it is computed (`Handoffs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import InitVar, dataclass, field

from engine.core.prompt_order import Order
from engine.core.step import (
    Command,
    Emit,
    OverlapStepWanted,
    RunStep,
    StepBatch,
    StepDone,
    StepWanted,
    Tick,
    scored_event,
)
from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.client_events import OfferConfirmed
from kvpool.core.fetch.fetches import Restored
from kvpool.core.fetch.prefix_lookup import PrefixLookup
from kvpool.core.transfer.commands import FromPeer, LayersWritten, PeerLost, SendPeer, SlabWritten
from kvpool.core.transfer.messages import (
    BlocksDigested,
    CancelTransfer,
    Committed,
    DigestBlocks,
    HandoffMode,
    PeerHello,
    PiecesAwaited,
    PiecesRead,
    SlabLent,
    TransferCancelled,
    is_chosen,
)
from kvpool.core.transfer.pool_map import KvFacts
from kvrelay.errors import FailureReason
from kvrelay.messages import Abort, Lifetime, LifetimeMoment, Prefill, Reserved, WorkerEvent
from kvrelay.types import Incarnation, RequestKey
from prefill_worker.job import Chunk, PrefillJob
from prefill_worker.queue import PrefillJobs, PromptQueue, PromptStep
from prefill_worker.sender import Sender

MOST_RENEWED = 400
"""Requests in one message, which has at most 64 KiB."""

OutgoingEvent = (
    FromPeer | PeerLost | SlabWritten | LayersWritten | OfferConfirmed | BlocksDigested | Tick
)


@dataclass(slots=True, kw_only=True)
class Handoffs:
    """What follows from events of decode workers and of this worker's transfers. `peers` are
    connected and have said hello. The decode worker checks the KV of one request in `canary_every`
    (0: of none)."""

    jobs: PrefillJobs
    mode: HandoffMode
    canary_every: int = 0
    transfers: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    peers: dict[Incarnation, KvFacts] = field(default_factory=dict)

    def handle(self, event: OutgoingEvent, now_s: float) -> list[Command]:
        match event:
            case FromPeer():
                return self._from_peer(event, now_s)
            case SlabWritten():
                return self._written(event, now_s)
            case LayersWritten():
                return self._layers_written(event)
            case BlocksDigested():
                return self._digested(event)
            case OfferConfirmed():
                return self._stored()
            case PeerLost(peer=peer):
                self.peers.pop(peer, None)
                return self.jobs.peer_lost(event, now_s)
            case Tick():
                return [*self._renewals()]

    def _renewals(self) -> Iterator[SendPeer]:
        """For each decode worker, of its requests."""
        targets: dict[Incarnation | None, list[PrefillJob]] = {}
        for job in self.jobs.live():
            if job.sender.has_target:
                targets.setdefault(job.message.target, []).append(job)
        for jobs in targets.values():
            for i in range(0, len(jobs), MOST_RENEWED):
                yield from self._renewal(jobs[i : i + MOST_RENEWED])

    def _renewal(self, jobs: list[PrefillJob]) -> list[SendPeer]:
        """One that waits for the pool, and of which nothing moves, is left out."""
        going = [job.key for job in jobs if self.jobs.makes_progress(job)]
        by_pool, goes = self.mode is HandoffMode.POOL, {*going}
        waiting = [
            job.key for job in jobs if job.key not in goes and not (by_pool and job.has_unstored)
        ]
        return [jobs[0].sender.renew(tuple(going), tuple(waiting))] if going or waiting else []

    def _from_peer(self, event: FromPeer, now_s: float) -> list[Command]:
        """A message for a job that is over, or from a worker that is not its target, changes
        nothing."""
        match event.message:
            case SlabLent(key=key) as lent if job := self.jobs.find(key, event.peer):
                return [*job.sender.lent(lent, self.jobs.tables(job))]
            case PiecesAwaited(key=key, pieces=pieces) if job := self.jobs.find(key, event.peer):
                return [*job.sender.awaited(pieces, self.jobs.tables(job))]
            case PiecesRead(key=key, pieces=pieces) if job := self.jobs.find(key, event.peer):
                job.sender.read(pieces)
                return self._commit(job)
            case PeerHello(kv=kv):
                return self._met(event.peer, kv)
            case Committed(key=key) if job := self.jobs.find(key, event.peer):
                return self.jobs.gone(key, now_s) if job.committing else []
            case CancelTransfer(key=key, reason=reason):
                return self._cancelled_by(event.peer, key, reason, now_s)
            case _:
                return []

    def _met(self, peer: Incarnation, kv: KvFacts) -> list[Command]:
        self.peers[peer] = kv
        jobs = self.jobs.live_for(peer)
        return [ahead for job in jobs for ahead in job.sender.met(kv, self.jobs.tables(job))]

    def _cancelled_by(
        self, peer: Incarnation, key: RequestKey, reason: str, now_s: float
    ) -> list[Command]:
        """The decode worker refuses it. The router is told from here, because nobody else may know
        why."""
        if key not in self.jobs:
            return [SendPeer(peer=peer, message=TransferCancelled(key=key, reason=reason))]
        job = self.jobs.find(key, peer)
        if job is None:
            return []
        return self.jobs.fail(job, FailureReason.TRANSFER_CANCELLED, reason, now_s)

    # --- moving ---------------------------------------------------------------------------------

    def _layers_written(self, event: LayersWritten) -> list[Command]:
        """A step that has ended needs no marks any more."""
        commands: list[Command] = []
        for chunk in self.jobs.queue.chunks_of(event.step):
            job = chunk.job
            if job.cancelled is None:
                tables = self.jobs.tables(job)
                commands += job.sender.layers_written(chunk.end, event.layer, tables)
        return commands

    def _written(self, event: SlabWritten, now_s: float) -> list[Command]:
        job = self.jobs[event.key]
        job.sender.written(event.piece)
        if job.cancelled is not None:
            return self.jobs.cancel(event.key, job.cancelled, now_s)
        if event.error is not None:
            return self.jobs.fail(job, FailureReason.TRANSFER_FAILED, event.error, now_s)
        self.transfers += 1
        self.transfer_bytes += event.bytes
        self.transfer_s += event.seconds
        return self._commit(job)

    def after_chunk(self, job: PrefillJob, now_s: float) -> list[Command]:
        """Its computed KV is sent; it ends when nothing is left to do."""
        if job.cancelled is not None:
            return self.jobs.cancel(job.key, job.cancelled, now_s)
        if job.all_finished:
            return self.jobs.cancel(job.key, "finished with its first token", now_s)
        writes = job.sender.computed(job.computed, self.jobs.tables(job))
        return [*writes, *self._commit(job)]

    def _commit(self, job: PrefillJob) -> list[Command]:
        """If it is ready. With `pool` the decode worker hears first what it can fetch by now."""
        by_pool = self.mode is HandoffMode.POOL
        told = self._tell_stored(job) if by_pool else []
        if job.cancelled is not None or not job.may_commit or (by_pool and job.has_unstored):
            return told
        job.committing = True
        job.sender.moved = True
        span = job.sender.handed_over
        if span is None or not is_chosen(job.key.request_id, self.canary_every):
            return [*told, job.sender.commit(job.first, job.finished)]
        job.awaits_digest = True
        return [DigestBlocks(holder=job.holder, span=span, tables=self.jobs.tables(job))]

    def _digested(self, event: BlocksDigested) -> list[Command]:
        """When the job is over, its blocks may belong to other jobs by now."""
        key = event.holder.key
        if key not in self.jobs or self.jobs[key].cancelled is not None:
            return []
        job = self.jobs[key]
        job.awaits_digest = False
        return [job.sender.commit(job.first, job.finished, event.digests[0])]

    def _stored(self) -> list[Command]:
        """More blocks can be fetched from the pool. Blocks are stored one request after another, so
        those behind make progress too."""
        if self.mode is not HandoffMode.POOL:
            return []
        commands: list[Command] = []
        for job in self.jobs.live():
            job.sender.moved = True
            commands += self._commit(job)
        return commands

    def _tell_stored(self, job: PrefillJob) -> list[Command]:
        if job.cancelled is not None or not job.has_unstored:
            return []
        more = self.jobs.lookup.stored_blocks(job.unstored)
        job.stored += more
        tokens = job.stored * self.jobs.block_tables.layout.block_size
        return [*job.sender.stored(tokens)] if more else []


PrefillEvent = (
    Prefill | Abort | StepWanted | OverlapStepWanted | StepDone | Restored | OutgoingEvent
)


@dataclass(slots=True, kw_only=True)
class PrefillScheduler:
    """`chunk_tokens` bounds the tokens of a step. `canary_every` is that of Handoffs. `order` says
    which prompt goes first."""

    lookup: PrefixLookup
    chunk_tokens: int
    mode: InitVar[HandoffMode] = HandoffMode.PUSH
    canary_every: InitVar[int] = 0
    order: InitVar[Order[PrefillJob] | None] = None
    prompt_tokens: int = 0
    tables: BlockTables = field(init=False)
    queue: PromptQueue = field(init=False)
    jobs: PrefillJobs = field(init=False)
    handoffs: Handoffs = field(init=False)

    def __post_init__(
        self, mode: HandoffMode, canary_every: int, order: Order[PrefillJob] | None
    ) -> None:
        self.tables = self.lookup.tables
        self.queue = PromptQueue(order or Order())
        self.jobs = PrefillJobs(lookup=self.lookup, queue=self.queue)
        self.handoffs = Handoffs(jobs=self.jobs, mode=mode, canary_every=canary_every)

    @property
    def has_work(self) -> bool:
        """There may be a step to run."""
        return bool(self.queue.awaiting_prefill)

    def handle(self, event: PrefillEvent, now_s: float) -> list[Command]:
        match event:
            case Prefill():
                return self._accept(event, now_s)
            case StepWanted() | OverlapStepWanted():
                return self._next_step(now_s)
            case StepDone():
                return self._step_done(event, now_s)
            case Restored():
                return self._restored(event, now_s)
            case Abort(key=key):
                return self.jobs.cancel(key, FailureReason.ABORTED, now_s)
            case _:
                return self.handoffs.handle(event, now_s)

    # --- chunks ---------------------------------------------------------------------------------

    def _accept(self, message: Prefill, now_s: float) -> list[Command]:
        key, target = message.spec.key, message.target
        sender = Sender(
            message=message,
            layout=self.tables.layout,
            mode=self.handoffs.mode,
            peer=None if target is None else self.handoffs.peers.get(target),
        )
        names = self.tables.names_of(message.spec)
        job = PrefillJob(sender=sender, holder=Holder("prefill", key), names=names)
        self.jobs.add(job, now_s)
        moment = Lifetime(key=key, at_s=now_s, name=LifetimeMoment.PREFILL_RECEIVED)
        if target is None:
            return [Emit(events=(Reserved(key=key, at_s=now_s), moment))]
        received = Emit(events=(moment,))
        return [received] if sender.peer else [received, sender.renew((key,))]  # connects

    def _next_step(self, now_s: float) -> list[Command]:
        step = self.queue.pack(self.lookup, budget_tokens=self.chunk_tokens, now_s=now_s)
        if step is None:
            return []
        fresh = [chunk.job for chunk in step.chunks if not chunk.job.started]
        ahead = [*self._announce_cached(fresh), *self._announce(step.chunks)]
        return [*self._started(fresh, now_s), *ahead, self._run(step)]

    def _run(self, step: PromptStep) -> RunStep:
        chunks, tables = step.chunks, self.tables.tables
        slices = tuple(chunk.job.slice(chunk, tables(chunk.job.holder)) for chunk in chunks)
        marks = (chunk.job.sender.layer_marks(chunk.start, chunk.end) for chunk in chunks)
        layer_marks = frozenset[int]().union(*marks)
        return RunStep(batch=StepBatch(slices=slices), layer_marks=layer_marks, number=step.number)

    def _restored(self, event: Restored, now_s: float) -> list[Command]:
        """Its prefix has come, or as much of it as there was."""
        job = self.jobs[event.holder.key]
        job.opened(event.tokens, event.origin)
        self.tables.trim(job.holder, job.seen_from)
        return [] if job.cancelled is None else self.jobs.cancel(job.key, job.cancelled, now_s)

    def _announce(self, chunks: Iterable[Chunk]) -> Iterator[Command]:
        """The tokens that are about to be computed."""
        for chunk in chunks:
            tables = self.tables.tables(chunk.job.holder)
            yield from chunk.job.sender.plan(chunk.start, chunk.end, tables)

    def _announce_cached(self, fresh: list[PrefillJob]) -> Iterator[Command]:
        """KV that was found here is handed over too, and at once."""
        for job in fresh:
            tables = self.tables.tables(job.holder)
            yield from job.sender.plan(0, job.cached, tables)
            yield from job.sender.computed(job.cached, tables)

    def _started(self, fresh: list[PrefillJob], now_s: float) -> list[Command]:
        for job in fresh:
            job.started = True
        return [Emit(events=tuple(job.started_event(now_s) for job in fresh))] if fresh else []

    def _step_done(self, done: StepDone, now_s: float) -> list[Command]:
        ran = self.queue.take_ran(done.seconds, now_s)
        self.lookup.note_prefill(sum([chunk.end - chunk.start for chunk in ran]), done.seconds)
        events: list[WorkerEvent] = []
        for i, (chunk, sampled) in enumerate(zip(ran, done.outcome.sampled, strict=True)):
            job, take = chunk.job, chunk.end - chunk.start
            self.prompt_tokens += take
            moment = LifetimeMoment.PREFILL_CHUNK
            events.append(Lifetime(key=job.key, at_s=now_s, name=moment, tokens=take))
            if (entries := done.outcome.prompt_logprobs.get(i)) is not None:
                events.append(scored_event(job.message.spec, chunk.end, take, entries, now_s))
            self.tables.fill(job.holder, job.filled)
            self.tables.trim(job.holder, job.seen_from)
            if sampled and job.cancelled is None and i not in done.outcome.failed:
                events += job.take_first(sampled, now_s)
                self.queue.remove(job)
        after: list[Command] = []
        for i, chunk in enumerate(ran):
            job = chunk.job
            if i in done.outcome.failed and job.cancelled is None:
                message = done.outcome.failed[i]
                after += self.jobs.fail(job, FailureReason.GRAMMAR, message, now_s)
            else:
                after += self.handoffs.after_chunk(job, now_s)
        return [Emit(events=tuple(events)), *after]

    def validate(self) -> None:
        self.jobs.validate()
