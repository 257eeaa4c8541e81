"""Which device each rank of a worker computes on."""

from __future__ import annotations

import torch

from kvrelay.errors import ModelError


def rank_devices(device: str, size: int) -> tuple[str, ...]:
    """# rank |-> its device, all of this machine. Raises ModelError."""
    if device == "cpu":
        return ("cpu",) * size
    if device != "cuda":
        raise ModelError(
            f"parallel.tensor {size} on {device}: ranks take the first GPUs that the worker sees: "
            "ask for the device cuda, and choose them by CUDA_VISIBLE_DEVICES"
        )
    return tuple(f"cuda:{rank}" for rank in range(size))


def check_gpus(size: int) -> None:
    """Raises ModelError where rank 0 can't reach the KV of all others."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < size:
        raise ModelError(
            f"parallel.tensor {size} on cuda: each rank needs a GPU and torch sees {found}: check "
            "nvidia-smi, CUDA_VISIBLE_DEVICES and resources.GPU of the pool"
        )
    apart = [rank for rank in range(1, size) if not torch.cuda.can_device_access_peer(0, rank)]
    if apart:
        raise ModelError(
            f"parallel.tensor {size} on cuda: cuda:0 can't reach the memory of cuda:{apart[0]}: "
            "choose GPUs with peer access (nvidia-smi topo -p2p r) by CUDA_VISIBLE_DEVICES"
        )
