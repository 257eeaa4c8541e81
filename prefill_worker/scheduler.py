"""Decides what a prefill worker computes next and what it hands over. Pure; one per worker.

Prompts are chunked under a token budget and packed in order of arrival, so memory is bounded
whatever the prompt's length. A prompt's blocks are taken all at once before its first chunk, so at
most the head of the queue waits for blocks, and those it waits for are always on their way out.

    awaiting_prefill -> prefilling -> handing_over -> (Committed) gone
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine.finish import finish_reason, needs_history
from engine.step import (
    Command,
    Emit,
    RunStep,
    Sampled,
    SampleRequest,
    SequenceSlice,
    StepBatch,
    StepDone,
    StepWanted,
    Tick,
)
from kvpool.handoff import (
    CancelTransfer,
    Committed,
    FromPeer,
    PeerLost,
    SendPeer,
    SlabLent,
    SlabWritten,
    TransferCancelled,
)
from kvpool.tables import BlockTables, Holder
from kvrelay.messages import (
    Abort,
    Lifetime,
    Prefill,
    Released,
    RequestFailed,
    Tokens,
    WorkerEvent,
)
from kvrelay.types import Incarnation, RequestKey
from prefill_worker.sender import Sender

Event = Prefill | Abort | StepWanted | StepDone | FromPeer | PeerLost | SlabWritten | Tick


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    """One prompt. `computed` tokens have their KV; `first` is token 0 of each choice."""

    sender: Sender
    holder: Holder
    computed: int = 0
    first: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    committing: bool = False

    @property
    def message(self) -> Prefill:
        return self.sender.message

    @property
    def key(self) -> RequestKey:
        return self.message.spec.key

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.message.spec.prompt_ids

    @property
    def remaining(self) -> int:
        return len(self.prompt) - self.computed


@dataclass(slots=True, kw_only=True)
class PrefillScheduler:
    """`chunk_tokens` bounds one step's tokens, `slab_tokens` one slab's."""

    tables: BlockTables
    chunk_tokens: int
    slab_tokens: int
    prompt_tokens: int = 0
    transfers: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    awaiting_prefill: deque[_Job] = field(default_factory=deque)
    _jobs: dict[RequestKey, _Job] = field(default_factory=dict)
    _running: tuple[tuple[_Job, int], ...] = ()  # the step now on the device: job, its tokens

    @property
    def waiting_tokens(self) -> int:
        return sum(job.remaining for job in self.awaiting_prefill)

    @property
    def waiting(self) -> int:
        return len(self.awaiting_prefill)

    @property
    def handing_over(self) -> int:
        return len(self._jobs) - len(self.awaiting_prefill)

    def handle(self, event: Event, now_s: float) -> list[Command]:
        match event:
            case Prefill():
                return self._accept(event, now_s)
            case StepWanted():
                return self._next_step(now_s)
            case StepDone():
                return self._step_done(event, now_s)
            case SlabWritten():
                return self._written(event, now_s)
            case FromPeer():
                return self._from_peer(event, now_s)
            case Abort(key=key):
                return self._cancel(key, "aborted", now_s)
            case PeerLost(peer=peer, reason=reason):
                return self._peer_lost(peer, reason, now_s)
            case Tick():
                live = [job for job in self._jobs.values() if job.sender.cancelled is None]
                return [job.sender.renew() for job in live]

    # --- chunks ---------------------------------------------------------------------------------

    def _accept(self, message: Prefill, now_s: float) -> list[Command]:
        key = message.spec.key
        assert key not in self._jobs, f"{key} is here already"
        sender = Sender(
            message=message,
            slab_tokens=self.slab_tokens,
            token_bytes=self.tables.layout.bytes_per_token,
        )
        job = _Job(sender=sender, holder=Holder("prefill", key))
        self._jobs[key] = job
        self.awaiting_prefill.append(job)
        return [Emit(events=(Lifetime(key=key, at_s=now_s, name="prefill_received"),))]

    def _next_step(self, now_s: float) -> list[Command]:
        assert not self._running, "a step is on the device"
        budget = self.chunk_tokens
        chosen: list[tuple[_Job, int]] = []
        started: list[WorkerEvent] = []
        for job in self.awaiting_prefill:
            if budget == 0 or not self._has_blocks(job, now_s):
                break
            take = min(budget, job.remaining)
            budget -= take
            chosen.append((job, take))
            if job.computed == 0:
                started.append(Lifetime(key=job.key, at_s=now_s, name="prefill_started"))
        if not chosen:
            return []
        self._running = tuple(chosen)
        wants = [
            want
            for job, take in chosen
            for want in job.sender.plan(job.computed, job.computed + take)
        ]
        batch = StepBatch(slices=tuple(self._slice(job, take) for job, take in chosen))
        emit: list[Command] = [Emit(events=tuple(started))] if started else []
        return [*emit, *wants, RunStep(batch=batch)]

    def _has_blocks(self, job: _Job, now_s: float) -> bool:
        return self.tables.try_grow(job.holder, len(job.prompt), now_s=now_s)

    def _slice(self, job: _Job, take: int) -> SequenceSlice:
        last = take == job.remaining
        return SequenceSlice(
            key=job.key,
            choice=0,
            token_ids=job.prompt[job.computed : job.computed + take],
            start=job.computed,
            tables=self.tables.tables(job.holder),
            samples=self._samples(job) if last else (),
            prompt_tokens=len(job.prompt),
        )

    @staticmethod
    def _samples(job: _Job) -> tuple[SampleRequest, ...]:
        sampling = job.message.spec.sampling
        history = job.prompt if needs_history(sampling) else ()
        return tuple(
            SampleRequest(
                sampling=sampling, choice=choice, index=0, prompt_ids=history, emitted_ids=()
            )
            for choice in range(sampling.n)
        )

    def _step_done(self, done: StepDone, now_s: float) -> list[Command]:
        running, self._running = self._running, ()
        events: list[WorkerEvent] = []
        for (job, take), sampled in zip(running, done.outcome.sampled, strict=True):
            job.computed += take
            self.prompt_tokens += take
            events.append(Lifetime(key=job.key, at_s=now_s, name="prefill_chunk", tokens=take))
            if sampled and job.sender.cancelled is None:
                events += self._first_tokens(job, sampled, now_s)
                self.awaiting_prefill.remove(job)
        after = [command for job, _ in running for command in self._after_chunk(job, now_s)]
        return [Emit(events=tuple(events)), *after]

    @staticmethod
    def _first_tokens(job: _Job, sampled: tuple[Sampled, ...], now_s: float) -> list[WorkerEvent]:
        sampling = job.message.spec.sampling
        job.first = tuple(s.token_id for s in sampled)
        reasons = [finish_reason(sampling, token_id=t, emitted=1) for t in job.first]
        job.finished = tuple(i for i, reason in enumerate(reasons) if reason is not None)
        return [
            Tokens(
                key=job.key,
                at_s=now_s,
                choice=choice,
                first_index=0,
                token_ids=(one.token_id,),
                logprobs=() if one.logprobs is None else (one.logprobs,),
                finish_reason=reason,
                stop_token_id=one.token_id if reason == "stop" else None,
            )
            for choice, (one, reason) in enumerate(zip(sampled, reasons, strict=True))
        ]

    # --- handoff --------------------------------------------------------------------------------

    def _after_chunk(self, job: _Job, now_s: float) -> list[Command]:
        if job.sender.cancelled is not None:
            return self._cancel(job.key, job.sender.cancelled, now_s)
        if len(job.finished) == job.message.spec.sampling.n:
            return self._cancel(job.key, "finished with its first token", now_s)
        writes = job.sender.computed(job.computed, self.tables.tables(job.holder))
        return [*writes, *self._commit_if_ready(job)]

    def _from_peer(self, event: FromPeer, now_s: float) -> list[Command]:
        """What comes for a job that is over, or from another than its target, changes nothing."""
        match event.message:
            case SlabLent(key=key) as lent if (job := self._live(key, event.peer)) is not None:
                return [*job.sender.lent(lent, self.tables.tables(job.holder))]
            case Committed(key=key) if (job := self._live(key, event.peer)) is not None:
                return self._gone(key, now_s) if job.committing else []
            case CancelTransfer(key=key, reason=reason):
                return self._cancelled_by(event.peer, key, reason, now_s)
            case _:
                return []

    def _live(self, key: RequestKey, peer: str) -> _Job | None:
        job = self._jobs.get(key)
        if job is None or job.sender.cancelled is not None or job.message.target != peer:
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
        if job.sender.cancelled is not None:
            return self._cancel(event.key, job.sender.cancelled, now_s)
        if event.error is not None:
            return self._fail(job, "transfer_failed", event.error, now_s)
        self.transfers += 1
        self.transfer_bytes += event.bytes
        self.transfer_s += event.seconds
        return self._commit_if_ready(job)

    def _commit_if_ready(self, job: _Job) -> list[Command]:
        if job.committing or not job.first or not job.sender.all_sent or not job.sender.settled:
            return []
        job.committing = True
        return [job.sender.commit(job.first, job.finished)]

    # --- endings --------------------------------------------------------------------------------

    def _cancel(self, key: RequestKey, reason: str, now_s: float) -> list[Command]:
        """Stop at once; the blocks and the fence wait for a step or writes in flight."""
        job = self._jobs.get(key)
        if job is None:
            return []
        job.sender.cancelled = reason
        if job in self.awaiting_prefill:
            self.awaiting_prefill.remove(job)
        on_device = any(job is running for running, _ in self._running)
        if on_device or not job.sender.settled:
            return []
        return [job.sender.fence(reason), *self._gone(key, now_s)]

    def _fail(self, job: _Job, reason: str, message: str, now_s: float) -> list[Command]:
        failed = RequestFailed(key=job.key, at_s=now_s, reason=reason, message=message)
        return [Emit(events=(failed,)), *self._cancel(job.key, reason, now_s)]

    def _peer_lost(self, peer: str, reason: str, now_s: float) -> list[Command]:
        lost = [job for job in self._jobs.values() if job.message.target == peer]
        return [
            command
            for job in lost
            if job.sender.cancelled is None
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
        assert all(job.key in self._jobs for job in self.awaiting_prefill)
