"""Hands hidden states from stage to stage between GPUs of one host, by NCCL. Never run so far: no
machine with two GPUs was available.

All is queued on the caller's stream, so no call waits for another stage: the stream does. One group
has all ranks. Within it torch gives each pair of them a communicator and a stream of their own, so
what comes in does not queue behind what goes out, and `abort` ends all of them at once.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from engine.device.group import peer_errors
from engine.parallel.grid import Grid
from engine.parallel.nccl_group import open_nccl

_TAG = 0


class NcclLine:
    def __init__(self, device: torch.device, grid: Grid, rank: int, meeting: Path) -> None:
        self._device = device
        self._grid, self._rank = grid, rank
        self._meeting = meeting
        self._nccl: Any = None  # a ProcessGroupNCCL, which torch has only with CUDA
        self._sending: tuple[Any, torch.Tensor] | None = None

    def connect(self) -> None:
        """From the first stage on: a stage greets the next when those before have met."""
        self._nccl = open_nccl(self._meeting, self._rank, self._grid.size)
        if self._grid.before(self._rank) is not None:
            self.receive((1,), torch.float32).item()
        if self._grid.after(self._rank) is not None:
            self.send(torch.zeros(1, device=self._device))

    def bound(self, timeout_s: float) -> None:
        assert self._nccl is not None, "not connected"
        self._nccl.set_timeout(timedelta(seconds=timeout_s))

    def send(self, hidden: torch.Tensor) -> None:
        """One may be on its way: the stream of the step waits for the one before."""
        to = self._grid.after(self._rank)
        assert self._nccl is not None and to is not None, "not connected, or the last stage"
        whole = hidden.contiguous()
        with peer_errors():
            if self._sending is not None:
                self._sending[0].wait()
            self._sending = self._nccl.send([whole], to, _TAG), whole

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        source = self._grid.before(self._rank)
        assert self._nccl is not None and source is not None, "not connected, or the first stage"
        hidden = torch.empty(shape, dtype=dtype, device=self._device)
        with peer_errors():
            self._nccl.recv([hidden], source, _TAG).wait()
        return hidden

    def give_up(self) -> None:
        """Ends running work on the device, which would wait for ever."""
        if self._nccl is not None:
            self._nccl.abort()

    def close(self) -> None:
        self._nccl = self._sending = None
