"""The head of every layer's attention: its new KV goes into its slots, and who waits for it is
told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.backends.inputs import blocks_view
from engine.layer_marks import LayerMarks
from kvpool.memory.kv_memory import KvMemory

Store = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""New keys and values `[kv_heads, tokens, dim]`, the layer's planes, slots int32 `[tokens]`."""


@dataclass(frozen=True, slots=True)
class Held:
    """A layer's planes `[slots, kv_heads, dim]`, with the KV of this step."""

    group: int
    keys: torch.Tensor
    values: torch.Tensor
    block_size: int

    @property
    def blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The planes as `[blocks, block_size, kv_heads, dim]`."""
        return blocks_view(self.keys, self.block_size), blocks_view(self.values, self.block_size)


@dataclass(frozen=True, slots=True)
class KvWriter:
    """Of one step. `places` is layer |-> (layer group, index in it), `slots` the groups'."""

    memory: KvMemory
    places: Mapping[int, tuple[int, int]]
    slots: Sequence[torch.Tensor]
    marks: LayerMarks | None
    store: Store

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Held:
        """`key`, `value` as `AttentionState.attend` gets them."""
        group, index = self.places[layer]
        keys, values = self.memory.layer(group, index)
        self.store(key[0], value[0], keys, values, self.slots[group])
        if self.marks is not None:
            self.marks.wrote(layer)
        return Held(group, keys, values, self.memory.layout.block_size)
