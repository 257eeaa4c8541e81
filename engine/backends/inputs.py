"""What every backend sends the device for a step: the model's inputs and the new KV's slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from engine.attention import AttentionState
from engine.backends.backend import Prepared
from engine.backends.packing import Packing
from engine.backends.step_arrays import Ints, StepArrays


@dataclass(frozen=True, slots=True)
class Inputs:
    """int32 tensors by name, sent in one copy."""

    views: Mapping[str, torch.Tensor]

    @property
    def slots(self) -> list[torch.Tensor]:
        """# layer group |->"""
        return [view for name, view in self.views.items() if name.endswith(".slots")]

    def prepared(self, state: AttentionState, rows: int | None = None) -> Prepared:
        """`rows`: only the first of them."""
        return Prepared(
            token_ids=self.views["token_ids"][None, :rows].long(),
            positions=self.views["positions"][None, :rows].long(),
            logit_rows=self.views["logit_rows"][:rows].long(),
            state=state,
        )


@dataclass(slots=True)
class Named:
    """The arrays to be sent."""

    arrays: dict[str, Ints] = field(default_factory=dict)

    @classmethod
    def of(cls, step: StepArrays) -> Named:
        arrays = [step.token_ids, step.positions, step.logit_rows]
        arrays += [group.slots for group in step.groups]
        return cls(dict(zip(cls.inputs(len(step.groups)), arrays, strict=True)))

    @staticmethod
    def inputs(groups: int) -> list[str]:
        """The names that `of` gives."""
        return ["token_ids", "positions", "logit_rows", *(f"{g}.slots" for g in range(groups))]

    def send(self, device: torch.device) -> Inputs:
        packing = Packing({name: array.shape for name, array in self.arrays.items()})
        host = packing.pack(self.arrays, pinned=device.type == "cuda")
        return Inputs(packing.views(host.to(device, non_blocking=True)))


def blocks_view(plane: torch.Tensor, block_size: int) -> torch.Tensor:
    """`[slots, heads, dim]` as `[blocks, block_size, heads, dim]`."""
    return plane.view(-1, block_size, *plane.shape[1:])
