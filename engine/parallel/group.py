"""The collectives of one worker's ranks. All call the same ones, in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]

from engine.parallel.board import PLACE_BYTES, Board
from kvrelay.errors import PeerError

TIMEOUT_S = 60.0
"""A rank that is gone ends a collective at once; one that hangs, after this."""
_LOOPBACK = "127.0.0.1"


class Group:
    """Small parts over a board in shared memory, large ones over gloo on loopback: a group of its
    own, not torch's global one, as a process may have several.

    Raises PeerError when another rank is gone, or hangs.
    """

    def __init__(self, rank: int, size: int, meeting: Path) -> None:
        """`meeting` is a file that all ranks see, and none exists there yet."""
        self.rank = rank
        self.size = size
        self._meeting = meeting
        self._board: Board | None = None
        self._gloo: Any = None  # a ProcessGroupGloo, most of which has no types

    def connect(self, memory: torch.Tensor) -> None:
        """Returns once all ranks have called it; `memory` is the board's."""
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=TIMEOUT_S)
        options._devices = [ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        store = FileStore(str(self._meeting), self.size)
        with _peer_errors():
            self._gloo = ProcessGroupGloo(store, self.rank, self.size, options)
        self._board = Board(memory, self.rank, self.size, TIMEOUT_S)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' parts added up; may take `part` over."""
        assert self._board is not None and self._gloo is not None, "not connected"
        if part.nbytes <= PLACE_BYTES:
            return self._board.sum(part)
        whole = part.contiguous()
        with _peer_errors():
            self._gloo.allreduce([whole]).wait()
        return whole

    def join(self, part: torch.Tensor, outputs: int) -> torch.Tensor:
        """The first `outputs` of all ranks' parts, of one shape, side by side in the last
        dimension."""
        assert self._board is not None and self._gloo is not None, "not connected"
        if part.nbytes <= PLACE_BYTES:
            return self._board.join(part)[..., :outputs]
        parts = [torch.empty_like(part) for _ in range(self.size)]
        with _peer_errors():
            self._gloo.allgather([parts], [part.contiguous()]).wait()
        return torch.cat(parts, dim=-1)[..., :outputs]

    def give_up(self) -> None:
        """A rank is gone: who waits for its part, or will, waits no longer."""
        if self._board is not None:
            self._board.closed = True

    def close(self) -> None:
        """When none of these is called any more."""
        self._board = self._gloo = None


@contextmanager
def _peer_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"a rank is gone, or hangs: {' '.join(str(error).split())}") from error
