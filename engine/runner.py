"""One worker's model over its paged KV memory: a batch of slices in, sampled tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.families import longrope_border_tokens
from engine.model import Model
from engine.paged import PagedAttention
from engine.plan import Planner
from engine.sampler import sample
from engine.sizing import KvSizing
from engine.step import SequenceSlice, StepBatch, StepOutcome
from kvpool.layout import KvLayout
from kvpool.memory import KvMemory
from kvpool.tables import CopyPairs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a worker tells of its model. `fingerprint` must be equal on both sides of a handoff."""

    architecture: str
    vocab_size: int
    max_model_len: int
    fingerprint: str
    device: str
    dtype: str


class Engine:
    """Runs steps. Not thread safe: one step at a time."""

    def __init__(
        self,
        model: Model,
        memory: KvMemory,
        facts: EngineFacts,
        sizing: KvSizing,
        *,
        needs_masks: bool = False,
    ) -> None:
        self.model = model
        self.memory = memory
        self.facts = facts
        self.sizing = sizing
        self._planner = Planner(memory.layout, model.device, model.dtype, needs_masks)
        self._places = {
            layer: (g, i)
            for g, group in enumerate(memory.layout.groups)
            for i, layer in enumerate(group.layers)
        }
        self._border_tokens = longrope_border_tokens(model.config)

    @property
    def layout(self) -> KvLayout:
        return self.memory.layout

    def run(self, batch: StepBatch) -> StepOutcome:
        """Writes the KV of every slice and samples where the batch asks for it."""
        wanted = [piece.samples for piece in batch.slices]
        tokens = iter(sample(self.logits(batch), [s for s in wanted if s]))
        return StepOutcome(sampled=tuple(next(tokens) if s else () for s in wanted))

    def logits(self, batch: StepBatch) -> torch.Tensor:
        """Run the step; fp32 `[slices that sample, vocab]`, in the batch's order."""
        border = self._border_tokens
        long = [border is not None and _length_tokens(s) > border for s in batch.slices]
        if len(set(long)) < 2:
            return self._forward(_whole(batch.slices, border))
        return self._forward_apart(batch.slices, long)

    def copy_blocks(self, pairs: CopyPairs) -> None:
        self.memory.copy_blocks(pairs)

    def _forward_apart(self, slices: Sequence[SequenceSlice], long: Sequence[bool]) -> torch.Tensor:
        """LongRoPE picks its factors per call: short and long sequences run in calls of their own,
        their logits are put back in order."""
        parts, places = [], []
        for wanted in (False, True):
            picked = [i for i, is_long in enumerate(long) if is_long == wanted]
            chosen = [slices[i] for i in picked]
            parts.append(self._forward(_whole(chosen, self._border_tokens)))
            places += [i for i in picked if slices[i].samples]
        order = sorted(range(len(places)), key=places.__getitem__)
        return torch.cat(parts)[order]

    def _forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        plan = self._planner.plan(slices)
        state = PagedAttention(self.memory, plan, self._places)
        return self.model.forward(plan.token_ids, plan.positions, plan.logit_rows, state).float()


def _length_tokens(piece: SequenceSlice) -> int:
    return max(piece.prompt_tokens, piece.start + len(piece.token_ids))


def _whole(slices: Sequence[SequenceSlice], border: int | None) -> Sequence[SequenceSlice]:
    """A sequence that grows over LongRoPE's border in this step is computed anew from its first
    token, for its earlier KV was made with the other factors."""
    if border is None:
        return slices
    return [_restart(s) if _crosses(s, border) else s for s in slices]


def _crosses(piece: SequenceSlice, border: int) -> bool:
    return bool(piece.samples) and piece.start == border and piece.prompt_tokens <= border


def _restart(piece: SequenceSlice) -> SequenceSlice:
    request = piece.samples[0]
    known = (*request.prompt_ids, *request.emitted_ids)[: piece.start]
    assert len(known) == piece.start, (len(known), piece.start)
    return replace(piece, token_ids=(*known, *piece.token_ids), start=0)
