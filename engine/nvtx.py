"""Named ranges for NVIDIA's profilers, such as Nsight Systems; they nest, thread by thread."""

from __future__ import annotations

from typing import Protocol

import torch


class Nvtx(Protocol):
    def range_push(self, msg: str) -> object: ...

    def range_pop(self) -> object: ...

    def mark(self, msg: str) -> object: ...


def nvtx(device: str) -> Nvtx | None:
    """None where there is no CUDA device to profile."""
    return torch.cuda.nvtx if torch.device(device).type == "cuda" else None
