"""Decides what a prefill worker does next. Pure; one per worker.

    awaiting_prefill -> prefilling -> handing_over -> (Committed) gone

Pieces of a prompt's KV are sent while the rest of it is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import InitVar, dataclass, field

from engine.prompts.order import Order
from engine.scoring import scored_event
from engine.step import Command, Emit, RunStep, StepBatch, StepDone, StepWanted
from kvpool.handoff import HandoffMode
from kvpool.holder import Holder
from kvpool.openings import Openings
from kvpool.tables import BlockTables
from kvpool.tiers.restores import Restored
from kvrelay.messages import Abort, Lifetime, Prefill, Reserved, WorkerEvent
from prefill_worker import handoffs
from prefill_worker.handoffs import Handoffs
from prefill_worker.job import Job
from prefill_worker.jobs import Jobs
from prefill_worker.prompt_queue import PromptQueue
from prefill_worker.sender import Sender

Event = Prefill | Abort | StepWanted | StepDone | Restored | handoffs.Event


@dataclass(slots=True, kw_only=True)
class PrefillScheduler:
    """`chunk_tokens` bounds one step's tokens. `canary_every` is that of Handoffs. `order` says who
    goes first."""

    openings: Openings
    chunk_tokens: int
    mode: InitVar[HandoffMode] = HandoffMode.PUSH
    canary_every: InitVar[int] = 0
    order: InitVar[Order[Job] | None] = None
    prompt_tokens: int = 0
    jobs: Jobs = field(init=False)
    handoffs: Handoffs = field(init=False)

    def __post_init__(self, mode: HandoffMode, canary_every: int, order: Order[Job] | None) -> None:
        self.jobs = Jobs(openings=self.openings, queue=PromptQueue(order or Order()))
        self.handoffs = Handoffs(jobs=self.jobs, mode=mode, canary_every=canary_every)

    @property
    def tables(self) -> BlockTables:
        return self.openings.tables

    @property
    def has_work(self) -> bool:
        """There may be a step to run."""
        return bool(self.queue.awaiting_prefill)

    @property
    def queue(self) -> PromptQueue:
        return self.jobs.queue

    def handle(self, event: Event, now_s: float) -> list[Command]:
        match event:
            case Prefill():
                return self._accept(event, now_s)
            case StepWanted():
                return self._next_step(now_s)
            case StepDone():
                return self._step_done(event, now_s)
            case Restored():
                return self._restored(event, now_s)
            case Abort(key=key):
                return self.jobs.cancel(key, "aborted", now_s)
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
        job = Job(sender=sender, holder=Holder("prefill", key), names=names)
        self.jobs.add(job, now_s)
        moment = Lifetime(key=key, at_s=now_s, name="prefill_received")
        if target is None:
            return [Emit(events=(Reserved(key=key, at_s=now_s), moment))]
        received = Emit(events=(moment,))
        return [received] if sender.peer else [received, *sender.renew()]  # connects

    def _next_step(self, now_s: float) -> list[Command]:
        chosen = self.queue.pack(self.openings, budget_tokens=self.chunk_tokens, now_s=now_s)
        if not chosen:
            return []
        fresh = [job for job, _ in chosen if not job.started]
        ahead = [*self._announce_cached(fresh), *self._announce(chosen)]
        slices = tuple(job.slice(take, self.tables.tables(job.holder)) for job, take in chosen)
        marks = {m for job, take in chosen for m in job.sender.layer_marks(job.end(take))}
        step = RunStep(batch=StepBatch(slices=slices), layer_marks=frozenset(marks))
        return [*self._started(fresh, now_s), *ahead, step]

    def _restored(self, event: Restored, now_s: float) -> list[Command]:
        """Its prefix has come, or what there was of it."""
        job = self.jobs[event.holder.key]
        job.opened(event.tokens, event.origin)
        self.tables.trim(job.holder, job.seen_from)
        return [] if job.cancelled is None else self.jobs.cancel(job.key, job.cancelled, now_s)

    def _announce(self, chosen: Iterable[tuple[Job, int]]) -> Iterator[Command]:
        """What is about to be computed."""
        for job, take in chosen:
            tables = self.tables.tables(job.holder)
            yield from job.sender.plan(job.computed, job.end(take), tables)

    def _announce_cached(self, fresh: list[Job]) -> Iterator[Command]:
        """What was found here travels too, and at once."""
        for job in fresh:
            tables = self.tables.tables(job.holder)
            yield from job.sender.plan(0, job.computed, tables)
            yield from job.sender.computed(job.computed, tables)

    def _started(self, fresh: list[Job], now_s: float) -> list[Command]:
        for job in fresh:
            job.started = True
        return [Emit(events=tuple(job.started_event(now_s) for job in fresh))] if fresh else []

    def _step_done(self, done: StepDone, now_s: float) -> list[Command]:
        ran = self.queue.take_ran(done.seconds, now_s)
        self.openings.computed(sum(take for _, take in ran), done.seconds)
        events: list[WorkerEvent] = []
        for i, ((job, take), sampled) in enumerate(zip(ran, done.outcome.sampled, strict=True)):
            self.prompt_tokens += take
            events.append(Lifetime(key=job.key, at_s=now_s, name="prefill_chunk", tokens=take))
            if (entries := done.outcome.prompt_logprobs.get(i)) is not None:
                events.append(scored_event(job.message.spec, job.computed, take, entries, now_s))
            self.tables.fill(job.holder, job.filled)
            self.tables.trim(job.holder, job.seen_from)
            if sampled and job.cancelled is None:
                events += job.take_first(sampled, now_s)
                self.queue.remove(job)
        after = [command for job, _ in ran for command in self.handoffs.after_chunk(job, now_s)]
        return [Emit(events=tuple(events)), *after]

    def validate(self) -> None:
        self.jobs.validate()
