"""What makes one transport differ from another once two endpoints can talk: whose memory is reached
how. `Exposure` is this process's memory, `PeerMemory` what it reaches of one peer's.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvpool.transport.peer.base import Read, RegionName, RegionWrite
from kvpool.transport.peer.control_wire import Grant

FetchGrant = Callable[[RegionName], Grant]
"""Ask the peer for a region. Raises PeerError when it has none of that name (any more)."""
Check = Callable[[], None]
"""Raises PeerError once the connection that asks has ended."""


class PeerMemory(Protocol):
    """Shared by all connections to one peer; thread safe."""

    def write(self, writes: Sequence[RegionWrite], check: Check) -> None: ...

    def read(self, reads: Sequence[Read], check: Check) -> None: ...

    def window(self, region: RegionName, check: Check) -> torch.Tensor | None: ...

    def retire(self, region: RegionName) -> None:
        """Returns once nothing is written to it from here."""

    def drain(self) -> None:
        """Returns once nothing is written to the peer."""

    def rest(self) -> bool:
        """Every region is to be asked for again. Whether the peer may be forgotten altogether, if
        no connection is left."""


class Exposure(Protocol):
    """Called by one thread at a time, except for `allocate`."""

    def allocate(self, nbytes: int, name: RegionName) -> torch.Tensor:
        """uint8 `[nbytes]` for a region, zeroed."""

    def expose(self, name: RegionName, memory: torch.Tensor) -> None:
        """Raises ConfigError when this transport cannot."""

    def grant(self, name: RegionName, peer: socket.socket) -> Grant: ...

    def retire(self, name: RegionName) -> None:
        """No longer granted; peers are being told."""

    def free(self, name: RegionName) -> None:
        """All peers have said that they use it no more, or are gone."""

    def peer(self, address: str, fetch: FetchGrant) -> PeerMemory: ...

    @property
    def staging_bytes(self) -> int: ...

    def close(self) -> None:
        """Frees what is left; no peer is."""
