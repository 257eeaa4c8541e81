"""Which CUDA stream a worker's steps run on. Where a prefill and a decode worker share a device,
the decode worker's kernels go first: its steps are short, and a user waits for each.

Small tensors between host and device, without waiting for the device. Runs in the worker.

A copy from memory that isn't pinned, and one to it, would wait for all that was launched before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_HIGH, _LOW = -1, 0


class StepStream:
    """`goes_first`: before kernels of streams that don't, as multiprocessors become free."""

    def __init__(self, device: torch.device, *, goes_first: bool) -> None:
        self._stream = self._beside = None
        if device.type == "cuda":
            priority = _HIGH if goes_first else _LOW
            self._stream = torch.cuda.Stream(device, priority=priority)
            self._beside = torch.cuda.Stream(device, priority=priority)

    def within(self) -> AbstractContextManager[object]:
        """What is launched inside runs on the stream, behind what this thread has launched."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def beside(self) -> AbstractContextManager[object]:
        """What is launched inside waits for nothing on the stream: what it reads is there already,
        and stays until it is done."""
        return nullcontext() if self._beside is None else torch.cuda.stream(self._beside)

    def mark(self) -> Callable[[], None]:
        """Waits, whatever is launched later, until the device has come to here."""
        if self._stream is None:
            return _no_wait
        event = torch.cuda.Event()
        event.record(self._stream)
        return event.synchronize


def _no_wait() -> None:
    pass


_Floats = NDArray[np.float32]


def send(values: Sequence[Any] | _Floats, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
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
