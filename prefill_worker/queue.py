"""The prompts of a prefill worker, from arrival to release, and which of them run next. Pure.

    awaiting_prefill -> prefilling -> handing_over -> gone

A step runs chunks of prompts, under a token budget. A prompt takes all its blocks before its first
chunk; in layer groups with a window it takes those of one chunk. When another prompt goes before a
half-computed one, the half-computed one keeps its blocks, and the other takes all of its own at
once, window or not. So at most one prompt asks for more blocks, and all others can end without
more. When the first prompt in order lacks blocks, no prompt after it takes any: blocks will come
free for it. A prompt that may have killed a worker has its steps for itself, and the device too.

A step may be launched behind one that is on the device. A prompt that would find more of its prefix
cached a moment later, when the step on the device has ended, is not begun behind that step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.core.prompt_order import Order
from engine.core.step import MOST_SCORED_TOKENS, Command, Emit
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.prefix_lookup import PrefixLookup
from kvpool.core.layout.layout import Tables
from kvpool.core.transfer.commands import PeerLost, SendPeer
from kvrelay.errors import FailureReason
from kvrelay.messages import Released, RequestFailed
from kvrelay.types import PrefixOrigin, RequestKey, value
from prefill_worker.job import Chunk, PrefillJob


@value
class PromptStep:
    """The `number`-th step of prompts on the device."""

    number: int
    chunks: tuple[Chunk, ...]

    @property
    def most(self) -> Chunk | None:
        """The chunk that has at least half of its tokens."""
        largest = max(self.chunks, key=lambda chunk: chunk.tokens)
        return largest if 2 * largest.tokens >= sum(one.tokens for one in self.chunks) else None


@dataclass(slots=True)
class PromptQueue:
    order: Order[PrefillJob] = field(default_factory=Order)
    awaiting_prefill: dict[RequestKey, PrefillJob] = field(default_factory=dict)
    on_device: deque[PromptStep] = field(default_factory=deque)  # the first one runs
    _opened: dict[RequestKey, PrefillJob] = field(default_factory=dict)  # of those that wait
    _growing: PrefillJob | None = None
    """It has not asked for all its blocks yet."""
    _steps: int = 0  # launched so far

    def __len__(self) -> int:
        return len(self.awaiting_prefill)

    @property
    def tokens(self) -> int:
        return sum([job.remaining for job in self.awaiting_prefill.values()])

    def add(self, job: PrefillJob, now_s: float) -> None:
        self.awaiting_prefill[job.key] = job
        self.order.add(job, now_s)

    def remove(self, job: PrefillJob) -> None:
        """Nothing happens when it does not wait."""
        if self.awaiting_prefill.pop(job.key, None) is not None:
            self.order.remove(job)
            self._opened.pop(job.key, None)
            if self._growing is job:
                self._growing = None

    # --- choosing -------------------------------------------------------------------------------

    def pack(self, lookup: PrefixLookup, *, budget_tokens: int, now_s: float) -> PromptStep | None:
        """The next step: chunks of the first prompts that have blocks and wait for no prefix."""
        step = _Step(lookup=lookup, now_s=now_s, budget_tokens=budget_tokens)
        if not (self.on_device and any(chunk.job.is_alone for chunk in self._chunks())):
            self._choose(step)
        if not step.chosen:
            return None
        launched = PromptStep(number=self._steps, chunks=tuple(step.chosen.values()))
        self._steps += 1
        self.on_device.append(launched)
        return launched

    def _choose(self, step: _Step) -> None:
        for job in self.order.order(step.now_s):
            if not step.budget_tokens:
                return
            if job.launched == job.prompt_tokens or (step.chosen and job.is_alone):
                continue
            if job.is_alone and self.on_device:
                return  # the device will be free for it
            if self.on_device and self._will_be_cached(job, step.lookup.tables):
                continue
            if not self._try_choose(job, step):
                self._choose_opened(step)
                return

    def _will_be_cached(self, job: PrefillJob, tables: BlockTables) -> bool:
        """Not begun yet, it will find one more block in the cache when a step on the device has
        ended. Only a prompt that was begun before and has most of that step can hold it up: it
        loses no turn to others."""
        if not tables.caching or job.holder in tables:
            return False
        fills = (chunk for step in self.on_device if (chunk := step.most) is not None)
        return any(chunk.job.fills_next_of(job) for chunk in fills)

    def _try_choose(self, job: PrefillJob, step: _Step) -> bool:
        """False when it lacks blocks."""
        if job.holder in step.lookup.tables:
            return step.try_go_on(job)
        if not step.try_open(job, whole=self._growing is not None):
            return False
        self._opened[job.key] = job
        if not step.has_all_blocks(job):
            self._growing = job
        return step.try_go_on(job)

    def _choose_opened(self, step: _Step) -> None:
        """Only prompts that hold their blocks go on."""
        for job in self._opened.values():
            shares = not job.is_alone or not (step.chosen or self.on_device)
            if step.budget_tokens and job.unlaunched and shares and job not in step.chosen:
                step.try_go_on(job)

    # --- afterwards -----------------------------------------------------------------------------

    def take_ran(self, seconds: float, now_s: float) -> tuple[Chunk, ...]:
        """The step that was launched first is over; it took `seconds`."""
        chunks = self.on_device.popleft().chunks
        for chunk in chunks:
            chunk.job.ran(chunk)
        ran = [(chunk.job, chunk.end - chunk.start) for chunk in chunks]
        self.order.ran(ran, seconds, now_s)
        return chunks

    def chunks_of(self, number: int) -> tuple[Chunk, ...]:
        """Of the step of that number; empty when it has ended."""
        return next((step.chunks for step in self.on_device if step.number == number), ())

    def _chunks(self) -> Iterator[Chunk]:
        return (chunk for step in self.on_device for chunk in step.chunks)

    def runs(self, job: PrefillJob) -> bool:
        return any(job is chunk.job for chunk in self._chunks())

    def validate(self) -> None:
        """Each waiting prompt has something left to compute, and is in the order once. What is
        launched of it and not computed is on the device."""
        waiting, launched = self.awaiting_prefill, Counter[PrefillJob]()
        for chunk in self._chunks():
            launched[chunk.job] += chunk.tokens
        assert all(job.remaining > 0 for job in waiting.values())
        assert all(job.launched - job.computed == launched[job] for job in waiting.values())
        assert waiting.keys() >= self._opened.keys()
        self.order.validate(waiting.values())


@dataclass(slots=True, kw_only=True)
class _Step:
    """One step being put together. It may run `budget_tokens` more, and `scored_tokens` more of
    prompts that are scored."""

    lookup: PrefixLookup
    now_s: float
    budget_tokens: int
    scored_tokens: int = MOST_SCORED_TOKENS
    chosen: dict[PrefillJob, Chunk] = field(default_factory=dict)

    def try_open(self, job: PrefillJob, *, whole: bool) -> bool:
        """Blocks for its next chunk, or the `whole` of it; what was cached counts as computed."""
        found = self.lookup.try_open(
            job.holder,
            job.prompt_tokens,
            hashes=job.reusable,
            ahead_tokens=job.prompt_tokens if whole else self.budget_tokens,
            now_s=self.now_s,
            hint=None if job.is_scored else job.message.prefix_source,
        )
        if found is None:
            return False
        job.opened(found, PrefixOrigin.DEVICE if found else PrefixOrigin.COMPUTED)
        return True

    def has_all_blocks(self, job: PrefillJob) -> bool:
        return self.lookup.tables.capacity(job.holder) >= job.prompt_tokens

    def try_go_on(self, job: PrefillJob) -> bool:
        """Takes its next chunk, unless its prefix is on its way; False when it lacks blocks."""
        tables = self.lookup.tables
        length = job.prompt_tokens
        end = min(length, job.launched + self.budget_tokens)
        if not tables.try_grow(job.holder, length, window_tokens=end, now_s=self.now_s):
            return False
        if not self.lookup.is_fetching(job.holder):
            self._take(job)
        return True

    def _take(self, job: PrefillJob) -> None:
        take = min(self.budget_tokens, job.unlaunched)
        if job.is_scored:
            take = min(take, self.scored_tokens)
            self.scored_tokens -= take
        if take:
            self.budget_tokens = 0 if job.is_alone else self.budget_tokens - take
            self.chosen[job] = job.launch(take)


@dataclass(slots=True, kw_only=True)
class PrefillJobs:
    lookup: PrefixLookup
    queue: PromptQueue = field(default_factory=PromptQueue)
    block_tables: BlockTables = field(init=False)
    _jobs: dict[RequestKey, PrefillJob] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.block_tables = self.lookup.tables

    @property
    def handing_over(self) -> int:
        return len(self._jobs) - len(self.queue.awaiting_prefill)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._jobs

    def __getitem__(self, key: RequestKey) -> PrefillJob:
        return self._jobs[key]

    def add(self, job: PrefillJob, now_s: float) -> None:
        assert job.key not in self._jobs, f"{job.key} is here already"
        self._jobs[job.key] = job
        self.queue.add(job, now_s)

    def live(self) -> Iterator[PrefillJob]:
        """Those that are not cancelled; some may be while this is read."""
        return (job for job in [*self._jobs.values()] if job.sender.cancelled is None)

    def makes_progress(self, job: PrefillJob) -> bool:
        """Since this was asked before some of its KV has moved; or it is this worker's turn: the
        prompt waits or is computed, or a copy or a digest of it is under way. A copy that hangs
        ends by its own limit."""
        moved = job.sender.take_moved()
        busy = not job.sender.settled or job.awaits_digest
        return moved or busy or job.key in self.queue.awaiting_prefill

    def live_for(self, peer: str) -> Iterator[PrefillJob]:
        return (job for job in self.live() if job.message.target == peer)

    def find(self, key: RequestKey, peer: str) -> PrefillJob | None:
        """The live job of that key, if it is for this peer."""
        job = self._jobs.get(key)
        if job is None or job.cancelled is not None or job.message.target != peer:
            return None
        return job

    def tables(self, job: PrefillJob) -> Tables:
        """A waiting prompt has none yet; nothing of it is planned either."""
        held = job.holder in self.block_tables
        return self.block_tables.tables(job.holder) if held else ()

    # --- endings --------------------------------------------------------------------------------

    def cancel(self, key: RequestKey, reason: str, now_s: float) -> list[Command]:
        """Stops it at once. Its blocks and the fence wait for the step or writes in flight."""
        job = self._jobs.get(key)
        if job is None:
            return []
        job.sender.cancelled = reason
        self.queue.remove(job)
        fetching = self.lookup.leave(job.holder)
        if fetching or self.queue.runs(job) or not job.sender.settled:
            return []
        return [*job.sender.fence(reason), *self.gone(key, now_s)]

    def fail(
        self, job: PrefillJob, reason: FailureReason, message: str, now_s: float
    ) -> list[Command]:
        failed = RequestFailed(key=job.key, at_s=now_s, reason=reason, message=message)
        return [Emit(events=(failed,)), *self.cancel(job.key, reason, now_s)]

    def peer_lost(self, event: PeerLost, now_s: float) -> list[Command]:
        return [
            command
            for job in self.live_for(event.peer)
            for command in self.fail(job, event.failure, event.reason, now_s)
            if not isinstance(command, SendPeer)
        ]

    def gone(self, key: RequestKey, now_s: float) -> list[Command]:
        job = self._jobs.pop(key, None)
        if job is None:
            return []
        self.block_tables.release(job.holder)
        return [Emit(events=(Released(key=key, at_s=now_s),))]

    def validate(self) -> None:
        """Each held prompt is one job's, and each job waits, runs or hands over."""
        held = {h.holder for h in self.block_tables.held() if h.holder.side == "prefill"}
        assert held <= {job.holder for job in self._jobs.values()}, held
        assert self.queue.awaiting_prefill.keys() <= self._jobs.keys()
        self.queue.validate()
