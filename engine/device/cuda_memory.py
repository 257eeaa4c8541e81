"""What a CUDA device's memory holds, as the driver and torch's allocator tell it.

    total = free + reserved + outside

`reserved` is what torch's allocator of this process has taken: weights, activations, the private
pools of recorded graphs, and cuBLAS's workspaces, which torch allocates for each stream that
multiplies (about 32 MiB on Hopper: torch's notes on CUDA, "cuBLAS workspaces"). `outside` is
everything else: the CUDA context with its kernels and their local memory, NCCL's buffers, what the
driver keeps for recorded graphs, and other processes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    total_bytes: int
    free_bytes: int
    reserved_bytes: int

    @property
    def outside_bytes(self) -> int:
        return self.total_bytes - self.free_bytes - self.reserved_bytes


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def release(self) -> None:
        """Gives back whatever nothing uses, with the workspaces of streams that are gone. Not after
        graphs were recorded that will be replayed: they use the workspace of their stream."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def trim(self) -> None:
        """Gives back what a step left. Graphs and workspaces stay."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def reading(self) -> Reading:
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        return Reading(total_bytes=total, free_bytes=free, reserved_bytes=reserved)

    def peak_bytes(self, step: Callable[[], object]) -> int:
        """What `step` takes from the device at most, with what its pieces waste."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        step()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before
