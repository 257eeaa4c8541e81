"""Prompts whose KV is still to be computed, and what of them runs next. Pure.

Prompts are chunked under a token budget, so memory is bounded whatever their length. A prompt's
blocks are taken all at once before its first chunk (in groups with a window, those of one chunk).
One that is half computed keeps its blocks when another goes before it, and that one takes all of
its own at once, window or not: so at most one asks for more, and all others can end without. Where
the first in order lacks blocks, none behind it takes any: those it waits for are on their way out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.prompts.order import Order
from engine.scoring import MOST_SCORED_TOKENS
from kvpool.openings import Openings
from kvrelay.types import PrefixOrigin, RequestKey
from prefill_worker.job import Job


@dataclass(slots=True)
class PromptQueue:
    order: Order[Job] = field(default_factory=Order)
    awaiting_prefill: dict[RequestKey, Job] = field(default_factory=dict)
    on_device: tuple[tuple[Job, int], ...] = ()  # job, its tokens in the step
    _opened: dict[RequestKey, Job] = field(default_factory=dict)  # of those that wait
    _growing: Job | None = None
    """It has yet to ask for some of its blocks."""

    def __len__(self) -> int:
        return len(self.awaiting_prefill)

    @property
    def tokens(self) -> int:
        return sum([job.remaining for job in self.awaiting_prefill.values()])

    def add(self, job: Job, now_s: float) -> None:
        self.awaiting_prefill[job.key] = job
        self.order.add(job, now_s)

    def remove(self, job: Job) -> None:
        """Removing what doesn't wait is fine."""
        if self.awaiting_prefill.pop(job.key, None) is not None:
            self.order.remove(job)
            self._opened.pop(job.key, None)
            if self._growing is job:
                self._growing = None

    # --- choosing -------------------------------------------------------------------------------

    def pack(
        self, openings: Openings, *, budget_tokens: int, now_s: float
    ) -> tuple[tuple[Job, int], ...]:
        """The next step: chunks of the first prompts that have blocks and wait for no prefix."""
        assert not self.on_device, "a step is on the device"
        step = _Step(openings=openings, now_s=now_s, budget_tokens=budget_tokens)
        for job in self.order.order(now_s):
            if not step.budget_tokens:
                break
            if not self._try_choose(job, step):
                self._choose_opened(step)
                break
        self.on_device = tuple(step.chosen.items())
        return self.on_device

    def _try_choose(self, job: Job, step: _Step) -> bool:
        """False when it lacks blocks."""
        if job.holder in step.openings.tables:
            return step.try_go_on(job)
        if not step.try_open(job, whole=self._growing is not None):
            return False
        self._opened[job.key] = job
        if not step.has_all_blocks(job):
            self._growing = job
        return step.try_go_on(job)

    def _choose_opened(self, step: _Step) -> None:
        """Only what has its blocks goes on."""
        for job in self._opened.values():
            if step.budget_tokens and job not in step.chosen:
                step.try_go_on(job)

    # --- afterwards -----------------------------------------------------------------------------

    def take_ran(self, seconds: float, now_s: float) -> tuple[tuple[Job, int], ...]:
        """A step is over that took so long."""
        ran, self.on_device = self.on_device, ()
        for job, take in ran:
            job.ran(take)
        self.order.ran(ran, seconds, now_s)
        return ran

    def runs(self, job: Job) -> bool:
        return any(job is running for running, _ in self.on_device)

    def validate(self) -> None:
        """Each waiting prompt has something left to compute, and is in the order once."""
        waiting = self.awaiting_prefill
        assert all(job.remaining > 0 for job in waiting.values())
        assert waiting.keys() >= self._opened.keys()
        self.order.validate(waiting.values())


@dataclass(slots=True, kw_only=True)
class _Step:
    """One step being put together; `budget_tokens` are left, and of prompts that are scored
    `scored_tokens`."""

    openings: Openings
    now_s: float
    budget_tokens: int
    scored_tokens: int = MOST_SCORED_TOKENS
    chosen: dict[Job, int] = field(default_factory=dict)  # its tokens in the step

    def try_open(self, job: Job, *, whole: bool) -> bool:
        """Blocks for its next chunk, or the `whole` of it; what was cached counts as computed."""
        found = self.openings.try_open(
            job.holder,
            len(job.prompt),
            hashes=job.reusable,
            ahead_tokens=len(job.prompt) if whole else self.budget_tokens,
            now_s=self.now_s,
            source=None if job.is_scored else job.message.prefix_source,
        )
        if found is None:
            return False
        job.opened(found, PrefixOrigin.DEVICE if found else PrefixOrigin.COMPUTED)
        return True

    def has_all_blocks(self, job: Job) -> bool:
        return self.openings.tables.capacity(job.holder) >= len(job.prompt)

    def try_go_on(self, job: Job) -> bool:
        """Takes its next chunk, unless its prefix is on its way; False when it lacks blocks."""
        tables = self.openings.tables
        end = min(len(job.prompt), job.computed + self.budget_tokens)
        if not tables.try_grow(job.holder, len(job.prompt), window_tokens=end, now_s=self.now_s):
            return False
        if not self.openings.waits(job.holder):
            self._take(job)
        return True

    def _take(self, job: Job) -> None:
        take = min(self.budget_tokens, job.remaining)
        if job.is_scored:
            take = min(take, self.scored_tokens)
            self.scored_tokens -= take
        if take:
            self.budget_tokens -= take
            self.chosen[job] = take
