"""The facts about this host's GPUs that cuda_ipc needs."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from kvpool.transport.gpu_files import NO_GPU, has_gpu_files


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """`without_peer_access` are pairs of devices that can't reach each other's memory."""

    names: tuple[str, ...]
    without_peer_access: tuple[tuple[int, int], ...]
    expandable_segments: bool  # memory of torch's allocator is then not IPC capable
    why_none: str = ""

    @property
    def count(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCount:
    """`why_none` says why there is no usable GPU; empty when there is one."""

    count: int
    why_none: str = ""


def count_gpus() -> GpuCount:
    """The GPUs that PyTorch can use. Starts nothing on the devices."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return GpuCount(count=count, why_none="" if count else _why_none())


def _why_none() -> str:
    if not has_gpu_files():
        return NO_GPU
    if torch.version.cuda is None and torch.version.hip is None:
        return f"PyTorch {torch.__version__} is built without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}"
    return "PyTorch finds no CUDA device: check the driver with nvidia-smi"


def gpu_name(device: torch.device) -> str:
    """The same in all processes of this host, whatever devices they see."""
    uuid: object = torch.cuda.get_device_properties(device).uuid
    return str(uuid)[:8]


def gpu_facts() -> GpuFacts:
    counted = count_gpus()
    count = counted.count
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
        why_none=counted.why_none,
    )
