"""The seam between the engine and the ways to compute attention on a device."""

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
    """One forward pass: its inputs, and what its attention reads and writes."""

    token_ids: torch.Tensor  # [1, tokens]
    positions: torch.Tensor  # [1, tokens]
    logit_rows: torch.Tensor  # [rows], as `engine.core.step` orders them
    state: AttentionState


class Backend(Protocol):
    """Prepares steps; all that is common to the layers of a step is done here, once."""

    def prepare(
        self, slices: Sequence[SequenceSlice], marks: LayerMarks | None = None
    ) -> Prepared: ...


class Replays(Protocol):
    """Runs steps that have been recorded."""

    def logits(
        self, slices: Sequence[SequenceSlice], token_ids: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """`[slices that sample, vocab]`, overwritten by the next step; None: not such a step. What
        is run instead of the slices' own tokens: `token_ids` `[slices]`, on the device."""

    def replay(self, sequences: int) -> torch.Tensor:
        """The step that was asked for last, of so many sequences, again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """What the layers of a layer group have in common. `window` counts the token itself."""

    query_heads: int
    kv_heads: int
    dim: int
    value_dim: int
    window: int | None
    has_softcap: bool = False
    has_sinks: bool = False

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query_heads // self.kv_heads
