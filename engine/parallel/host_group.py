"""Collectives between ranks on CPUs of one host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions
from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]

from engine.parallel.board import PLACE_BYTES, Board, board_bytes
from engine.parallel.group import LOADING_TIMEOUT_S, MEETING_TIMEOUT_S
from kvrelay.errors import PeerError

_LOOPBACK = "127.0.0.1"


class HostGroup:
    """Small parts over a board in shared memory, large ones over gloo on loopback."""

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
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=MEETING_TIMEOUT_S)
        options._devices = [ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        store = FileStore(str(self._meeting), self.size)
        with _peer_errors():
            self._gloo = ProcessGroupGloo(store, self.rank, self.size, options)
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
        with _peer_errors():
            self._gloo.allreduce([whole], options).wait()
        return whole

    def join(self, part: torch.Tensor, outputs: int) -> torch.Tensor:
        assert self._board is not None and self._gloo is not None, "not connected"
        if part.nbytes <= PLACE_BYTES:
            return self._board.join(part)[..., :outputs]
        parts, options = [torch.empty_like(part) for _ in range(self.size)], AllgatherOptions()
        options.timeout = self._timeout
        with _peer_errors():
            self._gloo.allgather([parts], [part.contiguous()], options).wait()
        return torch.cat(parts, dim=-1)[..., :outputs]

    def give_up(self) -> None:
        if self._board is not None:
            self._board.closed = True

    def close(self) -> None:
        self._board = self._gloo = None


@contextmanager
def _peer_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"a rank is gone, or hangs: {' '.join(str(error).split())}") from error
