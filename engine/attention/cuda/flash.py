"""Attention by FlashAttention-3, over its public paged interface (`flash_attn_interface`, from the
folder hopper/ of its repository). Hopper only; blocks may have any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from flash_attn_interface import flash_attn_with_kvcache

from engine.attention.backend import GroupShape, Prepared
from engine.attention.inputs import (
    Inputs,
    KvWriter,
    Named,
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


class FlashBackend:
    def __init__(
        self,
        memory: KvMemory,
        shapes: tuple[GroupShape, ...],
        places: Mapping[int, tuple[int, int]],
    ) -> None:
        self._memory, self._places = memory, places
        self._tables = TableCache()

    def prepare(self, slices: Sequence[SequenceSlice], marks: LayerMarks | None = None) -> Prepared:
        layout = self._memory.layout
        step = step_arrays(layout, slices, self._tables)
        named = Named.of(step)
        named.arrays["row_starts"] = starts_of(step.counts)
        for group in range(len(layout.groups)):
            seen = visible(layout, group, step)
            named.arrays |= {f"{group}.table": seen.table(), f"{group}.tokens": seen.tokens}
        inputs = named.send(self._memory.device)
        most = int(step.counts.max())
        writer = KvWriter(self._memory, self._places, inputs.slots, marks, store)
        return inputs.prepared(_State(writer, inputs, most))


@dataclass(frozen=True, slots=True)
class _State:
    writer: KvWriter
    inputs: Inputs
    most_tokens: int

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        held = self.writer.write(layer, key, value)
        keys, values = held.blocks
        views = self.inputs.views
        out: torch.Tensor = flash_attn_with_kvcache(
            query[0].transpose(0, 1),
            keys,
            values,
            cache_seqlens=views[f"{held.group}.tokens"],
            page_table=views[f"{held.group}.table"],
            cu_seqlens_q=views["row_starts"],
            max_seqlen_q=self.most_tokens,
            softmax_scale=scores.scaling,
            causal=True,
            window_size=(-1, -1) if scores.window is None else (scores.window - 1, 0),
            softcap=scores.softcap or 0.0,
            num_splits=0,
        )
        return out[None]
