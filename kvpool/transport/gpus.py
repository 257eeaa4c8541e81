"""What the GPUs of this host offer to cuda_ipc."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """`without_peer_access` are pairs of devices that can't reach each other's memory."""

    names: tuple[str, ...]
    without_peer_access: tuple[tuple[int, int], ...]
    expandable_segments: bool  # memory of torch's allocator is then not IPC capable

    @property
    def count(self) -> int:
        return len(self.names)


def gpu_facts() -> GpuFacts:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get(
        "PYTORCH_ALLOC_CONF", ""
    )
    return GpuFacts(
        names=tuple(torch.cuda.get_device_name(i) for i in range(count)),
        without_peer_access=tuple(
            (a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)
        ),
        expandable_segments="expandable_segments:true" in settings.lower(),
    )
