"""The collectives of one worker's ranks. All call the same ones, in the same order."""

from __future__ import annotations

from typing import Protocol

import torch

LOADING_TIMEOUT_S = 600.0
"""Ranks take turns to load, and some compile for longer than others."""
MEETING_TIMEOUT_S = 60.0
"""All have loaded when they meet; who is missing then has died."""


class Group(Protocol):
    """A group of its own, not torch's global one, as a process may have several.

    Its calls raise PeerError when another rank is gone, or hangs.
    """

    rank: int
    size: int

    @property
    def shared_bytes(self) -> int:
        """Memory that all ranks need to see."""

    def connect(self, memory: torch.Tensor) -> None:
        """Returns once all ranks have called it; `memory` is zeros, uint8 `[shared_bytes]`."""

    def bound(self, timeout_s: float) -> None:
        """How long another rank is waited for from now on."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' parts added up; may take `part` over."""

    def join(self, part: torch.Tensor, outputs: int) -> torch.Tensor:
        """The first `outputs` of all ranks' parts, of one shape, side by side in the last
        dimension."""

    def give_up(self) -> None:
        """A rank is gone: who waits for its part, or will, waits no longer."""

    def close(self) -> None:
        """When none of these is called any more."""
