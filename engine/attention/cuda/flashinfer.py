"""Attention by FlashInfer (arXiv:2501.01005), over its public paged wrapper, which plans a step's
work once for all layers. One wrapper serves decode rows and chunks alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper

from engine.attention.backend import GroupShape, Prepared
from engine.attention.inputs import (
    KvWriter,
    Named,
    StepArrays,
    TableCache,
    starts_of,
    step_arrays,
    visible,
)
from engine.attention.triton.launch import store
from engine.core.step import SequenceSlice
from engine.device.layer_marks import LayerMarks
from engine.model.interface import Scores
from kvpool.memory.kv_memory import KvMemory

_WORKSPACE_BYTES = 256 << 20
_STEPS = 2
"""One step may be launched while another runs. A wrapper keeps its plan in pinned memory, which the
device reads when it starts the step. No other step may have written there by then."""


class FlashInferBackend:
    def __init__(
        self,
        memory: KvMemory,
        shapes: tuple[GroupShape, ...],
        places: Mapping[int, tuple[int, int]],
    ) -> None:
        self._memory, self._shapes, self._places = memory, shapes, places
        self._tables = TableCache()
        workspaces = [
            torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=memory.device) for _ in shapes
        ]
        self._wrappers = cycle(
            [
                [BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD") for workspace in workspaces]
                for _ in range(_STEPS)
            ]
        )

    def prepare(self, slices: Sequence[SequenceSlice], marks: LayerMarks | None = None) -> Prepared:
        step = step_arrays(self._memory.layout, slices, self._tables)
        inputs = Named.of(step).send(self._memory.device)
        writer = KvWriter(self._memory, self._places, inputs.slots, marks, store)
        return inputs.prepared(_State(writer, self._shapes, next(self._wrappers), step))


@dataclass(frozen=True, slots=True)
class _State:
    writer: KvWriter
    shapes: tuple[GroupShape, ...]
    wrappers: list[Any]
    step: StepArrays
    planned: set[int] = field(default_factory=set)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        held = self.writer.write(layer, key, value)
        if held.group not in self.planned:
            self._plan(held.group, scores, query.dtype)
        rows = query[0].transpose(0, 1).contiguous()
        out: torch.Tensor = self.wrappers[held.group].run(rows, held.blocks)
        return out[None]

    def _plan(self, group: int, scores: Scores, dtype: torch.dtype) -> None:
        """Plans with the scores' properties, which only the first layer's call shows."""
        layout, shape = self.writer.memory.layout, self.shapes[group]
        seen = visible(layout, group, self.step)
        last = (seen.tokens - 1) % layout.block_size + 1
        indices = (starts_of(self.step.counts), starts_of(seen.counts), seen.blocks, last)
        self.wrappers[group].plan(
            *(torch.from_numpy(array).int() for array in indices),
            shape.query_heads,
            shape.kv_heads,
            shape.dim,
            layout.block_size,
            causal=True,
            sm_scale=scores.scaling,
            window_left=-1 if scores.window is None else scores.window - 1,
            logits_soft_cap=scores.softcap,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        self.planned.add(group)
