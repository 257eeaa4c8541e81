"""A loaded model and its backend, from which engines are made: drafts to check, to compare and to
measure, then the one that serves."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.attention.choosing.choice import ChosenBackend
from engine.checks.self_check import Reference, check_against_eager
from engine.core.sizing import (
    EngineLimits,
    KvSizing,
    MemoryProfile,
    of_one_host,
    size_kv,
    size_ranks,
)
from engine.core.step import StepBatch
from engine.device.cuda_memory import CudaMemory
from engine.memory_profile import profile_memory
from engine.model.model import Model
from engine.parallel.ranks import ALONE, Ranks, lies_apart, own_memory, rank_block_bytes
from engine.recording import rehearse_recording
from engine.runner import Engine, EngineFacts
from engine.step_comparison import (
    Times,
    blocks_wanted,
    fastest,
    sequences_of,
    step_times,
    told,
    warm,
)
from kvpool.core.layout.layout import KvLayout
from kvpool.memory.kv_memory import Allocate, KvMemory
from kvrelay.errors import ModelError

log = logging.getLogger(__name__)

_NO_ROOM = "attention.backend: auto has no memory in which to compare what is installed: name one"
_NOTHING = MemoryProfile(total_bytes=0, weight_bytes=0, activation_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """`layout` is the whole model's, `own` this rank's. `records`: decode steps are to be recorded
    as CUDA graphs."""

    model: Model
    facts: EngineFacts
    layout: KvLayout
    own: KvLayout
    backend: ChosenBackend
    limits: EngineLimits
    needs_masks: bool
    goes_first: bool
    records: bool
    ranks: Ranks

    def check(self, reference: Reference) -> None:
        """Raises ModelError if paged steps give other logits than `reference`."""
        check_against_eager(self.model, self.own, reference, self._draft_logits)

    def fastest_of(self, others: Sequence[ChosenBackend], reference: Reference) -> Assembly:
        """This one unless whole decode steps of another backend take less here. What `reference`
        refuses is left out. Raises ModelError."""
        if not others or self.model.stage is not None:
            return self
        device = CudaMemory(self.model.device)
        device.release()  # what the check has left
        try:
            return self._fastest_of(others, reference, device)
        except torch.OutOfMemoryError as error:
            if self.model.group is not None:
                raise ModelError(f"{_NO_ROOM}, such as {self.backend.name}") from error
            log.warning("%s: it is %s", _NO_ROOM, self.backend.name)
            return self
        finally:
            device.release()

    def _fastest_of(
        self, others: Sequence[ChosenBackend], reference: Reference, device: CudaMemory
    ) -> Assembly:
        memory, most = self._compared_memory(device), self.limits.max_running_requests
        tried = {self.backend.name: self}
        engines = {self.backend.name: self._warm(memory)}
        for backend in others:
            other = replace(self, backend=backend)
            engine = other._tried(memory, reference)
            if engine is not None:
                tried[backend.name], engines[backend.name] = other, engine
        found = step_times(engines, most)
        taken = fastest({name: self._of_all_ranks(own) for name, own in found.items()})
        log.info("attention.backend: auto is %s: %s", taken, told(found, most))
        return tried[taken]

    def sizing(self, blocks: int | None) -> KvSizing:
        """`blocks` None: as many as fit on all ranks beside a step's measured needs. Rank 0 decides
        by what all have measured."""
        profiles = (_NOTHING,) if blocks is not None else self.ranks.profiles(self._profile())
        if not self._is_first:
            return self._no_blocks()
        longest = self.facts.max_model_len
        parts = rank_block_bytes(self.layout, self.ranks.own)
        if len(profiles) > 1 and lies_apart(self.model.device):
            return size_ranks(
                self.layout, self.limits, profiles, max_model_len=longest, block_bytes=parts
            )
        return size_kv(
            self.layout,
            self.limits,
            of_one_host(profiles),
            max_model_len=longest,
            blocks=blocks,
            block_bytes=sum(parts),
        )

    def serving(self, sizing: KvSizing, allocate: Allocate | None) -> Engine:
        memory = self.ranks.memory(self.layout, sizing.blocks, self.model.device, allocate)
        layers = None if self.model.stage is None else self.model.stage.layers
        own = own_memory(memory, layers)
        if self.model.stage is not None:
            self.model.stage.join()
        return self._engine(memory, sizing, self.ranks, own)

    @property
    def _is_first(self) -> bool:
        return self.ranks.own is None or self.ranks.own.is_first

    def _profile(self) -> MemoryProfile:
        """Of this rank. Slabs are rank 0's alone."""
        limits = self.limits if self._is_first else replace(self.limits, staging_slabs=0)
        return profile_memory(
            self.model,
            self.own,
            limits,
            self.facts.max_model_len,
            self._run_draft,
            copies_kv=self.backend.copies_kv,
            record=self._record_draft if self.records else None,
            staged=self.layout,
        )

    def _compared_memory(self, device: CudaMemory) -> KvMemory:
        most, longest = self.limits.max_running_requests, self.facts.max_model_len
        blocks = blocks_wanted(self.own, most, longest, device.reading().free_bytes)
        return KvMemory(self.own, blocks, self.model.device)

    def _warm(self, memory: KvMemory) -> Engine:
        engine, most = self._engine(memory, self._no_blocks()), self.limits.max_running_requests
        if self.records:
            rehearse_recording(engine, sequences_of(most)[-1])
        warm(engine, most)
        return engine

    def _tried(self, memory: KvMemory, reference: Reference) -> Engine | None:
        """None: it can't serve. Raises ModelError if the start can't go on without it: other ranks
        would wait for this one's sums, and a broken device serves nobody."""
        try:
            self.check(reference)
            return self._warm(memory)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = f"{self.backend.name} failed ({' '.join(str(error).split())[:300]})"
            if self.model.group is not None or not _is_well(self.model.device):
                raise ModelError(
                    f"attention.backend: auto compared what is installed, and {reason}: "
                    "name another one"
                ) from error
            log.warning("attention.backend: auto goes on without %s", reason)
            return None

    def _of_all_ranks(self, times: Times) -> Times:
        group = self.model.group
        return times if group is None else tuple(group.sum(torch.tensor(times)).tolist())

    def _draft_logits(self, memory: KvMemory, batch: StepBatch) -> torch.Tensor:
        return self._engine(memory, self._no_blocks()).logits(batch)

    def _run_draft(self, memory: KvMemory, batch: StepBatch) -> object:
        return self._engine(memory, self._no_blocks()).run(batch)

    def _record_draft(self, memory: KvMemory) -> object:
        engine = self._engine(memory, self._no_blocks())
        return rehearse_recording(engine, self.limits.max_running_requests)

    def _no_blocks(self) -> KvSizing:
        longest = self.facts.max_model_len
        return KvSizing(blocks=0, tokens=0, max_model_len=longest, kv_bytes=0, reason="")

    def _engine(
        self,
        memory: KvMemory,
        sizing: KvSizing,
        ranks: Ranks = ALONE,
        own: KvMemory | None = None,
    ) -> Engine:
        """`own`: this rank's part of `memory`; None: all of it."""
        return Engine(
            self.model,
            memory,
            replace(self.facts, max_model_len=sizing.max_model_len),
            sizing,
            needs_masks=self.needs_masks,
            own=own or memory,
            backend=self.backend.open(own or memory),
            goes_first=self.goes_first,
            ranks=ranks,
        )


def _is_well(device: torch.device) -> bool:
    """CUDA's device tells of a kernel that failed whenever it is asked next."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
