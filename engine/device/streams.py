"""The CUDA stream of a worker's steps. Where a prefill and a decode worker share a device, the
decode worker's kernels go first: its steps are short, and a user waits for each.

Small tensors are copied between host and device without waiting for the device. A copy from or to
memory that isn't pinned would wait for all earlier launches.
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
    """`goes_first`: before kernels of other streams, as multiprocessors become free."""

    def __init__(self, device: torch.device, *, goes_first: bool) -> None:
        self.stream: torch.cuda.Stream | None = None
        """None on a CPU."""
        self._beside: torch.cuda.Stream | None = None
        if device.type == "cuda":
            priority = _HIGH if goes_first else _LOW
            self.stream = torch.cuda.Stream(device, priority=priority)
            self._beside = torch.cuda.Stream(device, priority=priority)

    def within(self) -> AbstractContextManager[object]:
        """Work launched in this context runs on the stream, after this thread's earlier
        launches."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        return torch.cuda.stream(self.stream)

    def beside(self) -> AbstractContextManager[object]:
        """Work launched in this context doesn't wait for the stream. Its inputs must be there
        already, and stay until it is done."""
        return nullcontext() if self._beside is None else torch.cuda.stream(self._beside)

    def mark(self) -> Callable[[], None]:
        """Waits until the device has reached this point, whatever is launched later."""
        if self.stream is None:
            return _no_wait
        event = torch.cuda.Event()
        event.record(self.stream)
        return event.synchronize


def _no_wait() -> None:
    pass


_Numbers = NDArray[np.float32] | NDArray[np.int32] | NDArray[np.int64]


def send(
    values: Sequence[Any] | _Numbers, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Sends numbers, or rows of numbers."""
    host = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def fetch(tensor: torch.Tensor) -> torch.Tensor:
    """On the host once the device has reached this point; the caller waits for that."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
