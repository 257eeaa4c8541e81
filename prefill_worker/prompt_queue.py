"""Prompts whose KV is still to be computed, in order of arrival, and what of them runs next. Pure.

Prompts are chunked under a token budget, so memory is bounded whatever their length. A prompt's
blocks are taken all at once before its first chunk (in groups with a window, those of one chunk).
So at most the head of the queue waits for blocks, and those it waits for are on their way out.

The first chunk begins where an earlier prompt parts from it: behind the whole blocks that both
share, the tokens that still agree are copied.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvpool.copies import CopyPairs
from kvpool.openings import Openings
from kvpool.tables import BlockTables
from kvrelay.types import PrefixOrigin
from prefill_worker.job import Job


@dataclass(slots=True)
class PromptQueue:
    awaiting_prefill: deque[Job] = field(default_factory=deque)
    on_device: tuple[tuple[Job, int], ...] = ()  # job, its tokens in the step
    copies: tuple[CopyPairs, ...] = ()  # to be made before the step

    def __len__(self) -> int:
        return len(self.awaiting_prefill)

    @property
    def tokens(self) -> int:
        return sum(job.remaining for job in self.awaiting_prefill)

    def add(self, job: Job) -> None:
        self.awaiting_prefill.append(job)

    def remove(self, job: Job) -> None:
        """Removing what doesn't wait is fine."""
        if job in self.awaiting_prefill:
            self.awaiting_prefill.remove(job)

    def pack(
        self, openings: Openings, *, budget_tokens: int, now_s: float
    ) -> tuple[tuple[Job, int], ...]:
        """The next step: chunks of the first prompts that have blocks and wait for no prefix."""
        assert not self.on_device, "a step is on the device"
        chosen: list[tuple[Job, int]] = []
        copies: list[CopyPairs] = []
        for job in self.awaiting_prefill:
            if budget_tokens == 0 or not _has_blocks(job, openings, budget_tokens, now_s):
                break
            if openings.waits(job.holder):
                continue
            if not job.started:
                copies += _copy(job, openings.tables)
            take = min(budget_tokens, job.remaining)
            budget_tokens -= take
            chosen.append((job, take))
        self.on_device, self.copies = tuple(chosen), tuple(copies)
        return self.on_device

    def take_ran(self, tables: BlockTables) -> tuple[tuple[Job, int], ...]:
        ran, self.on_device, self.copies = self.on_device, (), ()
        for job, take in ran:
            tables.copied(job.holder)
            job.ran(take)
        return ran

    def runs(self, job: Job) -> bool:
        return any(job is running for running, _ in self.on_device)

    def validate(self) -> None:
        """Each waiting prompt has something left to compute, and waits once."""
        assert all(job.remaining > 0 for job in self.awaiting_prefill)
        assert len({*map(id, self.awaiting_prefill)}) == len(self.awaiting_prefill)


def _copy(job: Job, tables: BlockTables) -> tuple[CopyPairs, ...]:
    """At least the last token is run, for its logits."""
    tokens, pairs = tables.begin_like_another(
        job.holder, job.names, job.prompt, end=len(job.prompt) - 1
    )
    if not tokens:
        return ()
    job.begins_like_another(tokens)
    return (pairs,)


def _has_blocks(job: Job, openings: Openings, budget_tokens: int, now_s: float) -> bool:
    """Whether its next `budget_tokens` tokens have room, and what may be copied before them; what
    was cached counts as computed."""
    tables, prompt_tokens = openings.tables, len(job.prompt)
    ahead_tokens = budget_tokens + (0 if job.started else tables.layout.block_size - 1)
    if job.holder in tables:
        end = min(prompt_tokens, job.computed + ahead_tokens)
        return tables.try_grow(job.holder, prompt_tokens, window_tokens=end, now_s=now_s)
    found = openings.try_open(
        job.holder,
        prompt_tokens,
        hashes=job.reusable,
        ahead_tokens=ahead_tokens,
        now_s=now_s,
        source=job.message.prefix_source,
    )
    if found is None:
        return False
    job.opened(found, PrefixOrigin.DEVICE if found else PrefixOrigin.COMPUTED)
    return True
