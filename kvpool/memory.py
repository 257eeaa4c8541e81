"""The device tier's tensors: paged KV of every layer. Runs in the worker that owns the blocks."""

from __future__ import annotations

import torch

from kvpool.layout import KvLayout
from kvpool.tables import CopyPairs


class KvMemory:
    """One tensor per (layer group, plane): `[layers, slots, heads, dim]`, slot = block x size."""

    def __init__(self, layout: KvLayout, blocks: int, device: torch.device | str) -> None:
        self.layout = layout
        self.blocks = blocks
        self.device = torch.device(device)
        dtype = getattr(torch, layout.dtype)
        slots = blocks * layout.block_size
        # layer group |-> plane |-> [layers, slots, heads, dim]
        self.planes: list[list[torch.Tensor]] = [
            [
                torch.zeros(
                    len(group.layers), slots, plane.heads, plane.dim, dtype=dtype, device=device
                )
                for plane in group.planes
            ]
            for group in layout.groups
        ]

    def layer(self, group: int, index: int) -> list[torch.Tensor]:
        """The planes `[slots, heads, dim]` of the group's `index`-th layer."""
        return [plane[index] for plane in self.planes[group]]

    def copy_blocks(self, pairs: CopyPairs) -> None:
        """Copy-on-write: `pairs[group]` are (source, destination) blocks."""
        size = self.layout.block_size
        for planes, group_pairs in zip(self.planes, pairs, strict=True):
            for source, target in group_pairs:
                for plane in planes:
                    plane[:, target * size : (target + 1) * size] = plane[
                        :, source * size : (source + 1) * size
                    ]
