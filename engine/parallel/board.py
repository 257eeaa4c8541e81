"""Shared memory on which the ranks of one host lay their parts of a sum, and wait for the others'.

Each rank has two places, used in turns: before it writes the same one again, it has seen that every
other rank is past the sum before, and so has read it.
"""

from __future__ import annotations

import os
import threading
import time

import torch

from kvrelay.errors import PeerError

PLACE_BYTES = 4 << 20
_BORDER_BYTES = 64  # between what two ranks write: a cache line
_YIELD_S = 2e-3
_NAP_S = 50e-6
"""Ranks are about equally fast: who waits longer has lost its core, or the other has."""


def board_bytes(size: int) -> int:
    return size * (_BORDER_BYTES + 2 * PLACE_BYTES)


class Board:
    """`memory` is uint8 `[board_bytes]`, zeros at first; all ranks call the same, in one order.

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
        """In float32 and in the order of ranks, so the same on all of them."""
        first, *others = self._exchange(part)
        whole = first.to(torch.float32, copy=True)
        for other in others:
            whole += other
        return whole.to(part.dtype)

    def join(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(part), dim=-1)

    def _exchange(self, part: torch.Tensor) -> list[torch.Tensor]:
        """# rank |-> its part, until the next call but one"""
        assert part.nbytes <= PLACE_BYTES, part.shape
        self._turn += 1
        places = self._places[self._turn % 2, :, : part.nbytes].view(part.dtype)
        found = [place.view(part.shape) for place in places]
        found[self._rank].copy_(part)
        with self._fence:  # what is written before it is seen before what is written after
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
