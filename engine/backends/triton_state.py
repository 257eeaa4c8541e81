"""One step's attention by the Triton kernels: what every layer's call reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention import Scores
from engine.backends.tilings import Tiling
from engine.backends.triton_launch import DeviceWork, Parts, attend
from engine.backends.writing import KvWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Query tiles of one kind, decode rows or chunks."""

    work: DeviceWork
    tiling: Tiling
    joined_rows: int


@dataclass(frozen=True, slots=True)
class TritonState:
    """`launches` are the layer groups'. `is_padded`: not every row belongs to a query tile."""

    writer: KvWriter
    launches: Sequence[Sequence[Launch]]
    parts: Parts
    is_padded: bool = False

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        held = self.writer.write(layer, key, value)
        asked = query[0].transpose(0, 1)
        new = query.new_zeros if self.is_padded else query.new_empty
        out = new(1, asked.shape[0], asked.shape[1], held.values.shape[2])
        for launch in self.launches[held.group]:
            attend(
                asked,
                held.keys,
                held.values,
                out[0],
                launch.work,
                self.parts,
                scores,
                launch.tiling,
                block_size=held.block_size,
                joined_rows=launch.joined_rows,
            )
        return out
