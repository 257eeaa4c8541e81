"""Small tensors between host and device, without waiting for the device. Runs in the worker.

A copy from memory that isn't pinned, and one to it, would wait for all that was launched before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def send(values: Sequence[Any] | Floats, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers, or rows of them."""
    host = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def fetch(tensor: torch.Tensor) -> torch.Tensor:
    """On the host once the device has come to here, which the caller waits for."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
