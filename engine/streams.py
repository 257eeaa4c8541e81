"""Which CUDA stream a worker's steps run on. Where a prefill and a decode worker share a device,
the decode worker's kernels go first: its steps are short, and a user waits for each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

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
