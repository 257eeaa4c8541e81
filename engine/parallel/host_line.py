"""Hands hidden states from stage to stage between processes of one host, by gloo on loopback."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from engine.device.group import LOADING_TIMEOUT_S, peer_errors
from engine.parallel.grid import Grid
from engine.parallel.host_group import open_gloo

_TAG = 0


class HostLine:
    """Connects all ranks of a worker, so that each meets the others."""

    def __init__(self, grid: Grid, rank: int, meeting: Path) -> None:
        self._grid, self._rank = grid, rank
        self._meeting = meeting
        self._gloo: Any = None  # a ProcessGroupGloo, most of which has no types
        self._timeout = timedelta(seconds=LOADING_TIMEOUT_S)
        self._sending: tuple[Any, torch.Tensor] | None = None

    def connect(self) -> None:
        self._gloo = open_gloo(self._meeting, self._rank, self._grid.size)
        with peer_errors():
            self._gloo.allreduce([torch.zeros(1)]).wait()  # all have read the file

    def bound(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)

    def send(self, hidden: torch.Tensor) -> None:
        """One may be on its way: the next stage may still compute the one before."""
        to = self._grid.after(self._rank)
        assert self._gloo is not None and to is not None, "not connected, or the last stage"
        whole = hidden.contiguous()
        with peer_errors():
            if self._sending is not None:
                self._sending[0].wait(self._timeout)
            self._sending = self._gloo.send([whole], to, _TAG), whole

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        source = self._grid.before(self._rank)
        assert self._gloo is not None and source is not None, "not connected, or the first stage"
        hidden = torch.empty(shape, dtype=dtype)
        with peer_errors():
            self._gloo.recv([hidden], source, _TAG).wait(self._timeout)
        return hidden

    def give_up(self) -> None:
        """Gloo tells who waits for a process that has ended."""

    def close(self) -> None:
        self._gloo = self._sending = None
