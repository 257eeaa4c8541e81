"""The difference between transports once two endpoints can talk: how memory is reached. `Exposure`
is this process's memory, `PeerMemory` the reachable memory of one peer."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvpool.transport.peer.base import Read, RegionName, RegionWrite
from kvpool.transport.peer.control_wire import Grant

FetchGrant = Callable[[RegionName], Grant]
"""Asks the peer for a region. Raises PeerError when it has no region of that name."""
Check = Callable[[], None]
"""Raises PeerError once the connection that asks has ended."""


class PeerMemory(Protocol):
    """Shared by all connections to one peer; thread safe."""

    def write(self, writes: Sequence[RegionWrite], check: Check) -> None: ...

    def read(self, reads: Sequence[Read], check: Check) -> None: ...

    def window(self, region: RegionName, check: Check) -> torch.Tensor | None: ...

    def retire(self, region: RegionName) -> None:
        """Returns once no write to it is running here."""

    def drain(self) -> None:
        """Returns once no write to the peer is running."""

    def rest(self, patience_s: float) -> bool:
        """Every region must be asked for again. Returns whether the peer may be forgotten if no
        connection is left. Raises PeerError when a copy with the peer still runs then."""


class Exposure(Protocol):
    """Called by one thread at a time, except for `allocate`."""

    def allocate(self, nbytes: int, name: RegionName) -> torch.Tensor:
        """uint8 `[nbytes]` for a region, zeroed."""

    def expose(self, name: RegionName, memory: torch.Tensor) -> None:
        """Raises ConfigError when this transport cannot expose it."""

    def grant(self, name: RegionName, peer: socket.socket) -> Grant: ...

    def retire(self, name: RegionName) -> None:
        """It is granted no more; peers are being told."""

    def free(self, name: RegionName) -> None:
        """All peers have stopped using it, or are gone."""

    def peer(self, address: str, fetch: FetchGrant) -> PeerMemory: ...

    @property
    def staging_bytes(self) -> int: ...

    def give_up(self) -> None:
        """The endpoint closes: copies that run may be given up, as their memory goes too."""

    def close(self) -> None:
        """Frees the rest; no peer is connected."""
