"""Collectives between ranks on GPUs of one host, each with its own. Never run so far: no machine
with two GPUs was available.

They are queued on the caller's stream, so no call waits for another rank, and a CUDA graph may
have them, if all ranks record and replay it. NCCL's watchdog finds a rank that hangs, and ends the
process; but not in a replayed step, of which it does not know. That one the worker's own watchdog
of steps finds. A group ends only after the graphs that have its sums.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import FileStore

from engine.device.group import LOADING_TIMEOUT_S, MEETING_TIMEOUT_S, peer_errors


class NcclGroup:
    shared_bytes = 0
    can_record = True

    def __init__(self, device: torch.device, rank: int, size: int, meeting: Path) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        self._meeting = meeting
        self._nccl: Any = None  # a ProcessGroupNCCL, which torch has only with CUDA

    def connect(self, memory: torch.Tensor) -> None:
        with peer_errors():
            self._nccl = open_nccl(self._meeting, self.rank, self.size)

    def bound(self, timeout_s: float) -> None:
        assert self._nccl is not None, "not connected"
        self._nccl.set_timeout(timedelta(seconds=timeout_s))

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """16-bit values are added in 16 bits: NCCL has no wider sums."""
        assert self._nccl is not None, "not connected"
        whole = part.to(self._device).contiguous()
        with peer_errors():
            self._nccl.allreduce([whole]).wait()
        return whole

    def join(self, part: torch.Tensor, outputs: int) -> torch.Tensor:
        assert self._nccl is not None, "not connected"
        parts = part.new_empty(self.size * len(part), *part.shape[1:])
        with peer_errors():
            self._nccl._allgather_base(parts, part.contiguous()).wait()
        return side_by_side(parts.view(self.size, *part.shape))[..., :outputs]

    def give_up(self) -> None:
        """Ends running work on the device, which would wait for ever."""
        if self._nccl is not None:
            self._nccl.abort()

    def close(self) -> None:
        self._nccl = None


def side_by_side(parts: torch.Tensor) -> torch.Tensor:
    """`[ranks, ..., n]` as `[..., ranks x n]`."""
    return parts.movedim(0, -2).flatten(-2)


def open_nccl(meeting: Path, rank: int, size: int) -> object:
    """A ProcessGroupNCCL of `size`. All see the file `meeting` as long as they live: NCCL's
    watchdogs ask it now and then."""
    kind: Any = distributed.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=LOADING_TIMEOUT_S)
    store = FileStore(str(meeting), size)
    store.set_timeout(timedelta(seconds=MEETING_TIMEOUT_S))
    made: object = kind(store, rank, size, options)
    return made
