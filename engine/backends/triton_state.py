"""One step's attention by the Triton kernels: what every layer's call reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.attention import Scores
from engine.backends.tilings import Tiling
from engine.backends.triton_launch import DeviceWork, Parts, attend, store
from engine.layer_marks import LayerMarks
from kvpool.memory.kv_memory import KvMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Query tiles of one kind, decode rows or chunks."""

    work: DeviceWork
    tiling: Tiling
    joined_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTensors:
    """One layer group's view of the step."""

    slots: torch.Tensor  # int32 [tokens], -1: a padded row
    launches: tuple[Launch, ...]


@dataclass(frozen=True, slots=True)
class TritonState:
    """Writes each layer's new KV into its slots, then attends. `is_padded`: not every row belongs
    to a query tile."""

    memory: KvMemory
    groups: tuple[GroupTensors, ...]
    places: Mapping[int, tuple[int, int]]
    parts: Parts
    marks: LayerMarks | None = None
    is_padded: bool = False

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
        store(key[0], value[0], keys, values, self.groups[group].slots)
        if self.marks is not None:
            self.marks.wrote(layer)
        asked = query[0].transpose(0, 1)
        new = query.new_zeros if self.is_padded else query.new_empty
        out = new(1, asked.shape[0], asked.shape[1], values.shape[2])
        for launch in self.groups[group].launches:
            attend(
                asked,
                keys,
                values,
                out[0],
                launch.work,
                self.parts,
                scores,
                launch.tiling,
                block_size=self.memory.layout.block_size,
                joined_rows=launch.joined_rows,
            )
        return out
