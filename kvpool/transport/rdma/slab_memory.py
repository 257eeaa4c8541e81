"""Where the slabs of an RDMA library lie: on the host, or on the worker's CUDA device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from kvpool.transport.mapped import memfd
from kvrelay.errors import ConfigError


class SlabPlace(StrEnum):
    HOST = "host"
    PINNED = "pinned"  # host memory that a device copies to and from at the bus's rate
    DEVICE = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabMemory:
    """`device` is the worker's; unused where slabs lie on the host. `why_host`: why those of a
    device's KV don't lie on it."""

    place: SlabPlace = SlabPlace.HOST
    device: str = "cpu"
    why_host: str = ""

    def check(self) -> None:
        """Raises ConfigError where there is no such device."""
        if self.place is not SlabPlace.HOST and not torch.cuda.is_available():
            raise ConfigError(f"slabs on {self.device} need a CUDA device, and PyTorch sees none")

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Zeros, uint8 `[nbytes]`, backed by at least one byte."""
        memory = torch.zeros(
            max(nbytes, 1),
            dtype=torch.uint8,
            device=self.device if self.place is SlabPlace.DEVICE else "cpu",
            pin_memory=self.place is SlabPlace.PINNED,
        )
        return memory[:nbytes]

    def takes(self, memory: torch.Tensor) -> bool:
        """Whether slabs may lie in this memory of another transport. Shared memory is pinned for
        it. Raises ConfigError when CUDA can't."""
        match self.place:
            case SlabPlace.DEVICE:
                return memory.is_cuda
            case SlabPlace.PINNED:
                return memory.is_cpu and (memory.is_pinned() or memfd.pin(memory))
            case SlabPlace.HOST:
                return memory.is_cpu

    def enter_device(self, *_: object) -> None:
        """Makes CUDA's context that of the calling thread."""
        if self.place is SlabPlace.DEVICE:
            torch.cuda.set_device(self.device)

    def reaches(self, memory: torch.Tensor) -> bool:
        return memory.is_cpu or (memory.is_cuda and self.place is SlabPlace.DEVICE)
