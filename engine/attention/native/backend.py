"""Attention on a CPU by our own kernel, as a backend of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.attention.backend import GroupShape, Prepared
from engine.attention.inputs import TableCache, step_arrays
from engine.attention.native.kernel import Layers, kernel_for
from engine.core.step import SequenceSlice
from engine.device.layer_marks import LayerMarks
from engine.model.interface import Scores
from kvpool.memory.kv_memory import KvMemory


class NativeBackend:
    def __init__(
        self,
        memory: KvMemory,
        shapes: tuple[GroupShape, ...],
        places: Mapping[int, tuple[int, int]],
    ) -> None:
        kernel = kernel_for(memory.layout, memory.device)
        assert kernel is not None, "asked before"
        self._kernel, self._memory, self._places = kernel, memory, places
        self._tables = TableCache()

    def prepare(self, slices: Sequence[SequenceSlice], marks: LayerMarks | None = None) -> Prepared:
        layout = self._memory.layout
        step = step_arrays(layout, slices, self._tables)
        groups = tuple(Layers(self._kernel, layout, g, step) for g in range(len(layout.groups)))
        return Prepared(
            token_ids=torch.from_numpy(step.token_ids)[None],
            positions=torch.from_numpy(step.positions)[None],
            logit_rows=torch.from_numpy(step.logit_rows),
            state=NativeState(self._memory, groups, self._places, marks),
        )


@dataclass(frozen=True, slots=True)
class NativeState:
    """One step's attention. A layer's mark is reported after its call, which writes KV first."""

    memory: KvMemory
    groups: tuple[Layers, ...]
    places: Mapping[int, tuple[int, int]]
    marks: LayerMarks | None = None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        group, index = self.places[layer]
        keys, values = self.memory.layer(group, index)
        out = self.groups[group].attend(keys, values, query, key, value, scores)
        if self.marks is not None:
            self.marks.wrote(layer)
        return out
