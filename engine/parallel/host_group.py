"""Collectives between ranks on CPUs of one host.

Ranks write their parts of a sum into shared memory, and wait for the others' parts. Each rank has
two buffers, used in turn. Before it writes the same one again, every other rank has finished the
sum before, and so has read it.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions
from torch.distributed import FileStore, ProcessGroupGloo

from engine.device.group import LOADING_TIMEOUT_S, MEETING_TIMEOUT_S, peer_errors
from kvrelay.errors import PeerError

PLACE_BYTES = 4 << 20
_BORDER_BYTES = 64  # a cache line between the ranks' memory
_YIELD_S = 2e-3
_NAP_S = 50e-6
"""Ranks are about equally fast: a rank that waits longer has lost its core, or the other has."""


def board_bytes(size: int) -> int:
    return size * (_BORDER_BYTES + 2 * PLACE_BYTES)


class Board:
    """`memory` is uint8 `[board_bytes]`, zeros at first; all ranks make the same calls, in one
    order.

    Raises PeerError when another rank doesn't come.
    """

    def __init__(self, memory: torch.Tensor, rank: int, size: int, timeout_s: float) -> None:
        self._rank = rank
        self.timeout_s = timeout_s
        border = size * _BORDER_BYTES
        turns = memory[:border].view(torch.int64).view(size, -1)
        self._turns = turns[:, 0].numpy()  # rank |-> how many parts it has laid down
        self._places = memory[border:].view(2, size, PLACE_BYTES)
        self._turn = 0
        self._fence = threading.Lock()
        self.closed = False

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """In float32 and in the order of ranks, so the result is the same on all."""
        first, *others = self._exchange(part)
        whole = first.to(torch.float32, copy=True)
        for other in others:
            whole += other
        return whole.to(part.dtype)

    def join(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(part), dim=-1)

    def _exchange(self, part: torch.Tensor) -> list[torch.Tensor]:
        """# rank |-> its part, valid until the next call but one"""
        assert part.nbytes <= PLACE_BYTES, part.shape
        self._turn += 1
        places = self._places[self._turn % 2, :, : part.nbytes].view(part.dtype)
        found = [place.view(part.shape) for place in places]
        found[self._rank].copy_(part)
        with self._fence:  # earlier writes are visible before later ones
            self._turns[self._rank] = self._turn
        self._wait()
        return found

    def _wait(self) -> None:
        started_s = time.monotonic()
        while self._turns.min() < self._turn:
            waited_s = time.monotonic() - started_s
            if waited_s < _YIELD_S:
                os.sched_yield()  # other threads go on
                continue
            if self.closed or waited_s > self.timeout_s:
                raise PeerError(f"rank {int(self._turns.argmin())} is gone, or hangs")
            time.sleep(_NAP_S)


_LOOPBACK = "127.0.0.1"


class HostGroup:
    """Small parts over a board in shared memory, large ones over gloo on loopback."""

    can_record = False

    def __init__(self, rank: int, size: int, meeting: Path) -> None:
        self.rank = rank
        self.size = size
        self._meeting = meeting
        self._board: Board | None = None
        self._gloo: Any = None  # a ProcessGroupGloo, most of which has no types
        self._timeout = timedelta(seconds=LOADING_TIMEOUT_S)

    @property
    def shared_bytes(self) -> int:
        return board_bytes(self.size)

    def connect(self, memory: torch.Tensor) -> None:
        self._gloo = open_gloo(self._meeting, self.rank, self.size)
        self._board = Board(memory, self.rank, self.size, LOADING_TIMEOUT_S)

    def bound(self, timeout_s: float) -> None:
        assert self._board is not None, "not connected"
        self._board.timeout_s = timeout_s
        self._timeout = timedelta(seconds=timeout_s)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        assert self._board is not None and self._gloo is not None, "not connected"
        if part.nbytes <= PLACE_BYTES:
            return self._board.sum(part)
        whole, options = part.contiguous(), AllreduceOptions()
        options.timeout = self._timeout
        with peer_errors():
            self._gloo.allreduce([whole], options).wait()
        return whole

    def join(self, part: torch.Tensor, outputs: int) -> torch.Tensor:
        assert self._board is not None and self._gloo is not None, "not connected"
        if part.nbytes <= PLACE_BYTES:
            return self._board.join(part)[..., :outputs]
        parts, options = [torch.empty_like(part) for _ in range(self.size)], AllgatherOptions()
        options.timeout = self._timeout
        with peer_errors():
            self._gloo.allgather([parts], [part.contiguous()], options).wait()
        return torch.cat(parts, dim=-1)[..., :outputs]

    def give_up(self) -> None:
        if self._board is not None:
            self._board.closed = True

    def close(self) -> None:
        self._board = self._gloo = None


def open_gloo(meeting: Path, rank: int, size: int) -> Any:
    """Returns once all ranks have called it. Raises PeerError when one doesn't come."""
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=MEETING_TIMEOUT_S)
    options._devices = [ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    with peer_errors():
        return ProcessGroupGloo(FileStore(str(meeting), size), rank, size, options)
