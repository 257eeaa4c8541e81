"""Hands hidden states from stage to stage between GPUs of one host, by NCCL. Never run so far: no
machine with two GPUs was available.

All is queued on the caller's stream, so no call waits for another stage: the stream does. Each pair
of stages has a group of its own, because what comes in may not queue behind what goes out.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from engine.device.group import peer_errors
from engine.parallel.grid import Grid
from engine.parallel.nccl_group import open_nccl

_GIVER, _TAKER = 0, 1
_TAG = 0


class NcclLine:
    def __init__(self, device: torch.device, grid: Grid, rank: int, meeting: Path) -> None:
        self._device = device
        self._meeting = meeting
        self._rank, self._to = rank, grid.after(rank)
        self._takes = grid.before(rank) is not None
        self._before: Any = None  # ProcessGroupNCCLs, which torch has only with CUDA
        self._after: Any = None
        self._sending: tuple[Any, torch.Tensor] | None = None

    def connect(self) -> None:
        """From the first stage on: a stage greets the next when those before have met."""
        torch.cuda.set_device(self._device)
        with peer_errors():
            if self._takes:
                self._before = open_nccl(self._pair(self._rank), _TAKER, 2)
                self.receive((1,), torch.float32).item()
            if self._to is not None:
                self._after = open_nccl(self._pair(self._to), _GIVER, 2)
                self.send(torch.zeros(1, device=self._device))

    def _pair(self, taker: int) -> Path:
        return self._meeting.with_name(f"{self._meeting.name}-{taker}")

    def bound(self, timeout_s: float) -> None:
        for pair in self._pairs():
            pair.set_timeout(timedelta(seconds=timeout_s))

    def send(self, hidden: torch.Tensor) -> None:
        """One may be on its way. Its memory is used again only after it: the stream waits."""
        assert self._after is not None, "not connected, or the last stage"
        whole = hidden.contiguous()
        with peer_errors():
            if self._sending is not None:
                self._sending[0].wait()
            self._sending = self._after.send([whole], _TAKER, _TAG), whole

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        assert self._before is not None, "not connected, or the first stage"
        hidden = torch.empty(shape, dtype=dtype, device=self._device)
        with peer_errors():
            self._before.recv([hidden], _GIVER, _TAG).wait()
        return hidden

    def give_up(self) -> None:
        """Ends running work on the device, which would wait for ever."""
        for pair in self._pairs():
            pair.abort()

    def close(self) -> None:
        self._before = self._after = self._sending = None

    def _pairs(self) -> list[Any]:
        return [pair for pair in (self._before, self._after) if pair is not None]
