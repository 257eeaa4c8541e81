"""Makes engines over a loaded model: drafts that check and measure it, and the one that serves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.backends.choice import Chosen
from engine.model import Model
from engine.parallel.ranks import ALONE, Ranks, block_bytes
from engine.parallel.share import profile_of_all
from engine.profile import profile_memory
from engine.runner import Engine, EngineFacts
from engine.self_check import Reference, check_against_eager
from engine.sizing import EngineLimits, KvSizing, MemoryProfile, size_kv
from engine.step import StepBatch
from kvpool.layout import KvLayout
from kvpool.memory.kv_memory import Allocate, KvMemory

_NOTHING = MemoryProfile(total_bytes=0, weight_bytes=0, activation_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """`layout` is the whole model's, `own` this rank's."""

    model: Model
    facts: EngineFacts
    layout: KvLayout
    own: KvLayout
    backend: Chosen
    limits: EngineLimits
    needs_masks: bool
    goes_first: bool
    ranks: Ranks

    def check(self, reference: Reference) -> None:
        """Raises ModelError where paged steps give other logits than `reference`."""
        check_against_eager(self.model, self.own, reference, self._draft_logits)

    def sizing(self, blocks: int | None) -> KvSizing:
        """`blocks` None: as many as the memory holds beside what a step needs, which is measured.
        Rank 0 decides for all."""
        profile = _NOTHING if blocks is not None else self._profile()
        if self.ranks.group is not None and self.ranks.group.rank != 0:
            return self._no_blocks()
        return size_kv(
            self.layout,
            self.limits,
            profile,
            max_model_len=self.facts.max_model_len,
            blocks=blocks,
            block_bytes=block_bytes(self.layout, self.ranks.group),
        )

    def serving(self, sizing: KvSizing, allocate: Allocate | None) -> Engine:
        memory = self.ranks.memory(self.layout, sizing.blocks, self.model.device, allocate)
        return self._engine(memory, sizing, self.ranks)

    def _profile(self) -> MemoryProfile:
        alone = profile_memory(
            self.model,
            self.own,
            self.limits,
            self.facts.max_model_len,
            self._run_draft,
            copies_kv=self.backend.copies_kv,
        )
        return profile_of_all(alone, self.ranks.group, on_cpu=self.model.on_cpu)

    def _draft_logits(self, memory: KvMemory, batch: StepBatch) -> torch.Tensor:
        return self._engine(memory, self._no_blocks()).logits(batch)

    def _run_draft(self, memory: KvMemory, batch: StepBatch) -> object:
        return self._engine(memory, self._no_blocks()).run(batch)

    def _no_blocks(self) -> KvSizing:
        longest = self.facts.max_model_len
        return KvSizing(blocks=0, tokens=0, max_model_len=longest, kv_bytes=0, reason="")

    def _engine(self, memory: KvMemory, sizing: KvSizing, ranks: Ranks = ALONE) -> Engine:
        return Engine(
            self.model,
            memory,
            replace(self.facts, max_model_len=sizing.max_model_len),
            sizing,
            needs_masks=self.needs_masks,
            backend=self.backend.open(memory.parts[0]),
            goes_first=self.goes_first,
            ranks=ranks,
        )
