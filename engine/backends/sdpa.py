"""Attention in plain torch operations, as a backend beside the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine.backends.backend import GroupShape, Prepared
from engine.layer_marks import LayerMarks
from engine.paged import PagedAttention
from engine.plan import Planner
from engine.step import SequenceSlice
from kvpool.memory.kv_memory import KvMemory


class SdpaBackend:
    def __init__(
        self,
        memory: KvMemory,
        shapes: tuple[GroupShape, ...],
        places: Mapping[int, tuple[int, int]],
    ) -> None:
        self._memory, self._places = memory, dict(places)
        dtype = getattr(torch, memory.layout.dtype)
        needs_masks = any(shape.has_softcap or shape.has_sinks for shape in shapes)
        self._planner = Planner(memory.layout, memory.device, dtype, needs_masks)

    def prepare(self, slices: Sequence[SequenceSlice], marks: LayerMarks | None = None) -> Prepared:
        plan = self._planner.plan(slices)
        return Prepared(
            token_ids=plan.token_ids,
            positions=plan.positions,
            logit_rows=plan.logit_rows,
            state=PagedAttention(self._memory, plan, self._places, marks),
        )
