"""The interface between the engine and the attention backends of a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.core.step import SequenceSlice
from engine.device.layer_marks import LayerMarks
from engine.model.interface import AttentionState


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One forward pass: its inputs, and the KV that its attention reads and writes."""

    token_ids: torch.Tensor  # [1, tokens]
    positions: torch.Tensor  # [1, tokens]
    logit_rows: torch.Tensor  # [rows], as `engine.core.step` orders them
    state: AttentionState


class Backend(Protocol):
    """Prepares steps: work that all layers share is done here, once."""

    def prepare(
        self, slices: Sequence[SequenceSlice], marks: LayerMarks | None = None
    ) -> Prepared: ...


class Replays(Protocol):
    """Runs recorded steps."""

    def has(self, slices: Sequence[SequenceSlice]) -> bool:
        """This step is a recorded one."""

    def logits(
        self, slices: Sequence[SequenceSlice], token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Of a recorded step: `[slices that sample, vocab]`, overwritten by the next step.
        `token_ids` `[slices]`, on the device, replace the slices' own tokens."""

    def replay(self, sequences: int) -> torch.Tensor:
        """Runs the last requested step, of this many sequences, again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """Common properties of a layer group's layers. `window` includes the token itself."""

    query_heads: int
    kv_heads: int
    dim: int
    value_dim: int
    window: int | None
    has_softcap: bool = False
    has_sinks: bool = False

    @property
    def group(self) -> int:
        """Query heads of each KV head."""
        return self.query_heads // self.kv_heads
