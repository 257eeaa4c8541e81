"""Decides what a prefill worker does next. Pure; one per worker.

    awaiting_prefill -> prefilling -> handing_over -> (Committed) gone

Pieces of a prompt's KV are sent while the rest of it is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from engine.step import Command, Emit, RunStep, StepBatch, StepDone, StepWanted, Tick
from kvpool.canary import is_chosen
from kvpool.handoff import (
    CancelTransfer,
    Committed,
    HandoffMode,
    PeerHello,
    PieceAwaited,
    PieceRead,
    SlabLent,
    TransferCancelled,
)
from kvpool.handoff_events import FromPeer, LayersWritten, PeerLost, SendPeer, SlabWritten
from kvpool.layout import Tables
from kvpool.openings import Openings
from kvpool.pool_client_events import OfferSettled
from kvpool.pool_map import KvFacts
from kvpool.restores import Restored
from kvpool.tables import BlockTables, Holder
from kvrelay.messages import Abort, Lifetime, Prefill, Released, RequestFailed, WorkerEvent
from kvrelay.types import Incarnation, RequestKey
from prefill_worker.job import Job
from prefill_worker.prompt_queue import PromptQueue
from prefill_worker.sender import Sender

Event = (
    Prefill
    | Abort
    | StepWanted
    | StepDone
    | LayersWritten
    | FromPeer
    | PeerLost
    | SlabWritten
    | Restored
    | OfferSettled
    | Tick
)


@dataclass(slots=True, kw_only=True)
class PrefillScheduler:
    """`chunk_tokens` bounds one step's tokens. The KV of one request in `canary_every` is checked
    by the decode worker (0: of none)."""

    openings: Openings
    chunk_tokens: int
    mode: HandoffMode = HandoffMode.PUSH
    canary_every: int = 0
    prompt_tokens: int = 0
    transfers: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    queue: PromptQueue = field(default_factory=PromptQueue)
    _jobs: dict[RequestKey, Job] = field(default_factory=dict)
    _peers: dict[Incarnation, KvFacts] = field(default_factory=dict)
    """Those that are connected and have said hello."""

    @property
    def tables(self) -> BlockTables:
        return self.openings.tables

    @property
    def waiting_tokens(self) -> int:
        return self.queue.tokens

    @property
    def waiting(self) -> int:
        return len(self.queue)

    @property
    def handing_over(self) -> int:
        return len(self._jobs) - len(self.queue)

    def handle(self, event: Event, now_s: float) -> list[Command]:
        match event:
            case Prefill():
                return self._accept(event, now_s)
            case StepWanted():
                return self._next_step(now_s)
            case StepDone():
                return self._step_done(event, now_s)
            case LayersWritten(layer=layer):
                return self._layers_written(layer)
            case SlabWritten():
                return self._written(event, now_s)
            case Restored():
                return self._restored(event, now_s)
            case OfferSettled():
                return [c for job in [*self._jobs.values()] for c in self._commit_if_ready(job)]
            case FromPeer():
                return self._from_peer(event, now_s)
            case Abort(key=key):
                return self._cancel(key, "aborted", now_s)
            case PeerLost(peer=peer, reason=reason):
                return self._peer_lost(peer, reason, now_s)
            case Tick():
                live = [job for job in self._jobs.values() if job.cancelled is None]
                return [job.sender.renew() for job in live]

    # --- chunks ---------------------------------------------------------------------------------

    def _accept(self, message: Prefill, now_s: float) -> list[Command]:
        key = message.spec.key
        assert key not in self._jobs, f"{key} is here already"
        sender = Sender(
            message=message,
            layout=self.tables.layout,
            mode=self.mode,
            peer=self._peers.get(message.target),
            checked=is_chosen(key.request_id, self.canary_every),
        )
        names = self.tables.chain(message.spec.tenant, len(message.spec.prompt_ids))
        names.extend(message.spec.prompt_ids, len(message.spec.prompt_ids))
        job = Job(sender=sender, holder=Holder("prefill", key), names=names)
        self._jobs[key] = job
        self.queue.add(job)
        received = Emit(events=(Lifetime(key=key, at_s=now_s, name="prefill_received"),))
        return [received] if sender.peer else [received, sender.renew()]  # connects

    def _next_step(self, now_s: float) -> list[Command]:
        chosen = self.queue.pack(self.openings, budget_tokens=self.chunk_tokens, now_s=now_s)
        if not chosen:
            return []
        fresh = [job for job, _ in chosen if not job.started]
        ahead = [*self._announce_cached(fresh), *self._announce(chosen)]
        slices = tuple(job.slice(take, self.tables.tables(job.holder)) for job, take in chosen)
        marks = {m for job, take in chosen for m in job.sender.layer_marks(job.computed + take)}
        step = RunStep(batch=StepBatch(slices=slices), layer_marks=frozenset(marks))
        return [*self._started(fresh, now_s), *ahead, step]

    def _restored(self, event: Restored, now_s: float) -> list[Command]:
        """Its prefix has come, or what there was of it."""
        job = self._jobs[event.holder.key]
        job.opened(event.tokens, event.origin)
        self.tables.trim(job.holder, job.seen_from)
        return [] if job.cancelled is None else self._cancel(job.key, job.cancelled, now_s)

    def _announce(self, chosen: Iterable[tuple[Job, int]]) -> Iterator[Command]:
        """What is about to be computed."""
        for job, take in chosen:
            end = job.computed + take
            yield from job.sender.plan(job.computed, end, self.tables.tables(job.holder))

    def _announce_cached(self, fresh: list[Job]) -> Iterator[Command]:
        """What was found here travels too, and at once."""
        for job in fresh:
            tables = self.tables.tables(job.holder)
            yield from job.sender.plan(0, job.cached, tables)
            yield from job.sender.computed(job.cached, tables)

    def _started(self, fresh: list[Job], now_s: float) -> list[Command]:
        for job in fresh:
            job.started = True
        return [Emit(events=tuple(job.started_event(now_s) for job in fresh))] if fresh else []

    def _step_done(self, done: StepDone, now_s: float) -> list[Command]:
        ran = self.queue.take_ran()
        self.openings.computed(sum(take for _, take in ran), done.seconds)
        events: list[WorkerEvent] = []
        for i, ((job, take), sampled) in enumerate(zip(ran, done.outcome.sampled, strict=True)):
            self.prompt_tokens += take
            events.append(Lifetime(key=job.key, at_s=now_s, name="prefill_chunk", tokens=take))
            self.tables.fill(job.holder, job.filled)
            self.tables.trim(job.holder, job.seen_from)
            if sampled and job.cancelled is None:
                events += job.take_first(sampled, now_s)
                job.sketch = done.outcome.sketches.get(i)
                self.queue.remove(job)
        after = [command for job, _ in ran for command in self._after_chunk(job, now_s)]
        return [Emit(events=tuple(events)), *after]

    def _layers_written(self, layer: int) -> list[Command]:
        running = ((job, take) for job, take in self.queue.on_device if job.cancelled is None)
        return [
            move
            for job, take in running
            for move in job.sender.layers_written(
                job.computed + take, layer, self.tables.tables(job.holder)
            )
        ]

    # --- handoff --------------------------------------------------------------------------------

    def _after_chunk(self, job: Job, now_s: float) -> list[Command]:
        if job.cancelled is not None:
            return self._cancel(job.key, job.cancelled, now_s)
        if job.all_finished:
            return self._cancel(job.key, "finished with its first token", now_s)
        writes = job.sender.computed(job.computed, self.tables.tables(job.holder))
        return [*writes, *self._commit_if_ready(job)]

    def _from_peer(self, event: FromPeer, now_s: float) -> list[Command]:
        """What comes for a job that is over, or from another than its target, changes nothing."""
        match event.message:
            case SlabLent(key=key) as lent if (job := self._live(key, event.peer)) is not None:
                return [*job.sender.lent(lent, self.tables.tables(job.holder))]
            case PieceAwaited(key=key, piece=piece) if job := self._live(key, event.peer):
                return [*job.sender.awaited(piece, self.tables.tables(job.holder))]
            case PieceRead(key=key, piece=piece) if job := self._live(key, event.peer):
                job.sender.read(piece)
                return self._commit_if_ready(job)
            case PeerHello(kv=kv):
                return self._met(event.peer, kv)
            case Committed(key=key) if (job := self._live(key, event.peer)) is not None:
                return self._gone(key, now_s) if job.committing else []
            case CancelTransfer(key=key, reason=reason):
                return self._cancelled_by(event.peer, key, reason, now_s)
            case _:
                return []

    def _met(self, peer: Incarnation, kv: KvFacts) -> list[Command]:
        self._peers[peer] = kv
        jobs = [job for job in self._jobs.values() if self._live(job.key, peer)]
        return [ahead for job in jobs for ahead in job.sender.met(kv, self._tables(job))]

    def _tables(self, job: Job) -> Tables:
        """None yet for one that waits: nothing of it is planned either."""
        return self.tables.tables(job.holder) if job.holder in self.tables else ()

    def _live(self, key: RequestKey, peer: str) -> Job | None:
        job = self._jobs.get(key)
        if job is None or job.cancelled is not None or job.message.target != peer:
            return None
        return job

    def _cancelled_by(
        self, peer: Incarnation, key: RequestKey, reason: str, now_s: float
    ) -> list[Command]:
        """The decode worker won't have it. Its router is told: no one else may tell it why."""
        if key not in self._jobs:
            return [SendPeer(peer=peer, message=TransferCancelled(key=key, reason=reason))]
        job = self._live(key, peer)
        return [] if job is None else self._fail(job, "transfer_cancelled", reason, now_s)

    def _written(self, event: SlabWritten, now_s: float) -> list[Command]:
        job = self._jobs[event.key]
        job.sender.written(event.piece)
        if job.cancelled is not None:
            return self._cancel(event.key, job.cancelled, now_s)
        if event.error is not None:
            return self._fail(job, "transfer_failed", event.error, now_s)
        self.transfers += 1
        self.transfer_bytes += event.bytes
        self.transfer_s += event.seconds
        return self._commit_if_ready(job)

    def _commit_if_ready(self, job: Job) -> list[Command]:
        if job.cancelled is not None or not job.may_commit or not self._is_stored(job):
            return []
        job.committing = True
        return [job.sender.commit(job.first, job.finished, job.sketch)]

    def _is_stored(self, job: Job) -> bool:
        """With `pool`, what the decode worker is to fetch there."""
        return self.mode is not HandoffMode.POOL or self.openings.is_stored(job.filled)

    # --- endings --------------------------------------------------------------------------------

    def _cancel(self, key: RequestKey, reason: str, now_s: float) -> list[Command]:
        """Stop at once; the blocks and the fence wait for a step or writes in flight."""
        job = self._jobs.get(key)
        if job is None:
            return []
        job.sender.cancelled = reason
        self.queue.remove(job)
        fetching = self.openings.drop(job.holder)
        if fetching or self.queue.runs(job) or not job.sender.settled:
            return []
        return [job.sender.fence(reason), *self._gone(key, now_s)]

    def _fail(self, job: Job, reason: str, message: str, now_s: float) -> list[Command]:
        failed = RequestFailed(key=job.key, at_s=now_s, reason=reason, message=message)
        return [Emit(events=(failed,)), *self._cancel(job.key, reason, now_s)]

    def _peer_lost(self, peer: Incarnation, reason: str, now_s: float) -> list[Command]:
        self._peers.pop(peer, None)
        lost = [job for job in self._jobs.values() if job.message.target == peer]
        return [
            command
            for job in lost
            if job.cancelled is None
            for command in self._fail(job, "peer_lost", reason, now_s)
            if not isinstance(command, SendPeer)
        ]

    def _gone(self, key: RequestKey, now_s: float) -> list[Command]:
        job = self._jobs.pop(key, None)
        if job is None:
            return []
        self.tables.release(job.holder)
        return [Emit(events=(Released(key=key, at_s=now_s),))]

    def validate(self) -> None:
        """Each held prompt is one job's, and each job waits, runs or hands over."""
        held = {h.holder for h in self.tables.held() if h.holder.side == "prefill"}
        assert held <= {job.holder for job in self._jobs.values()}, held
        assert all(job.key in self._jobs for job in self.queue.awaiting_prefill)
        self.queue.validate()
