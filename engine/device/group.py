"""The collectives of one worker's ranks. All call the same ones, in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from kvrelay.errors import PeerError

LOADING_TIMEOUT_S = 600.0
"""Some ranks load, check or compile for longer than others."""
MEETING_TIMEOUT_S = 60.0
"""All ranks have loaded when they meet; a missing rank has died."""


class Group(Protocol):
    """A group of one worker's ranks, not torch's global group, because a process may have several.

    Its calls raise PeerError when another rank is gone or hangs.
    """

    rank: int
    size: int
    can_record: bool
    """Its calls may be part of a recorded CUDA graph."""

    @property
    def shared_bytes(self) -> int:
        """The size of the memory that all ranks share."""

    def connect(self, memory: torch.Tensor) -> None:
        """Returns once all ranks have called it; `memory` is zeros, uint8 `[shared_bytes]`."""

    def bound(self, timeout_s: float) -> None:
        """From now on, another rank is waited for at most this long."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts; may overwrite `part`."""

    def join(self, part: torch.Tensor, outputs: int) -> torch.Tensor:
        """The first `outputs` of all ranks' parts, of one shape, joined in the last dimension."""

    def give_up(self) -> None:
        """A rank is gone: nobody waits for its part any more."""

    def close(self) -> None:
        """Call it when no other call is running or will come."""


class Line(Protocol):
    """Hands hidden states from each stage of a worker's model to the next.

    Its calls raise PeerError when another rank is gone or hangs.
    """

    def connect(self) -> None:
        """Returns once all ranks have called it."""

    def bound(self, timeout_s: float) -> None:
        """From now on, another rank is waited for at most this long."""

    def send(self, hidden: torch.Tensor) -> None:
        """To the next stage, which need not wait for it yet; `hidden` may not change afterwards."""

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What the stage before has sent, in the order in which it was sent."""

    def give_up(self) -> None:
        """A rank is gone: nobody waits for its hidden states any more."""

    def close(self) -> None:
        """Call it when no other call is running or will come."""


@contextmanager
def peer_errors() -> Iterator[None]:
    """What gloo or NCCL raises becomes PeerError."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"a rank is gone, or hangs: {' '.join(str(error).split())}") from error
