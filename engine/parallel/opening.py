"""Opens the group that the devices of a worker's ranks need."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.device.group import Group


def open_group(device: str, rank: int, size: int, meeting: Path) -> Group:
    """NCCL between GPUs, shared memory and gloo between processes that compute on CPUs. `meeting`
    is a file that all ranks see and that doesn't exist yet."""
    if torch.device(device).type == "cuda":
        from engine.parallel.nccl_group import NcclGroup

        return NcclGroup(torch.device(device), rank, size, meeting)
    from engine.parallel.host_group import HostGroup

    return HostGroup(rank, size, meeting)
