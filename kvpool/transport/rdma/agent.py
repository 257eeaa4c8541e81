"""The interface of an RDMA library for kvpool.transport.rdma.one_sided.

It moves bytes between registered memory here and registered memory of a peer, on the side that
asks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from kvpool.transport.peer.base import RegionName
from kvpool.transport.peer.exposure import Check
from kvrelay.errors import PeerError

_PLACE = struct.Struct("<QQi")  # address, bytes, device
HOST = -1
"""Stands where a CUDA device's number would."""


class Operation(Enum):
    WRITE = "write"
    READ = "read"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlace:
    """The place of a region, as sent to peers."""

    address: int
    nbytes: int
    key: bytes  # for the peer's agent
    device: int = HOST  # the number of the peer's CUDA device

    def pack(self) -> bytes:
        return _PLACE.pack(self.address, self.nbytes, self.device) + self.key

    @staticmethod
    def unpack(payload: bytes) -> RegionPlace:
        """Raises PeerError."""
        if len(payload) < _PLACE.size:
            raise PeerError(f"the peer granted a region in {len(payload)} bytes")
        address, nbytes, device = _PLACE.unpack_from(payload)
        key = payload[_PLACE.size :]
        return RegionPlace(address=address, nbytes=nbytes, key=key, device=device)

    def overlaps(self, other: RegionPlace) -> bool:
        return (
            self.address < other.address + other.nbytes
            and other.address < self.address + self.nbytes
        )


def device_of(memory: torch.Tensor) -> int:
    """The number of its CUDA device, or HOST."""
    return memory.get_device() if memory.is_cuda else HOST


def not_registered(library: str, memory: torch.Tensor, error: Exception) -> str:
    return f"{library} can't register {memory.numel()} bytes of {memory.device}: {error}"


RegionPiece = tuple[torch.Tensor, RegionName, int]
"""Contiguous registered memory here, of at least one byte; a learnt region of the peer, and an
address in it."""


class Remote(Protocol):
    """An agent's knowledge of one peer. Used by one thread at a time."""

    def learn(self, region: RegionName, place: RegionPlace) -> None:
        """Raises PeerError when the key can't be used here."""

    def forget(self, region: RegionName) -> None:
        """The peer has retired it."""

    def transfer(self, operation: Operation, pieces: Sequence[RegionPiece], check: Check) -> None:
        """One batch. Returns once all bytes have arrived and are visible. Raises PeerError when
        they could not, or the error of `check`, which is called when it takes long."""

    def rest(self) -> bool:
        """Forgets every region. Returns whether the peer may be dropped if it is not used."""


class Agent(Protocol):
    """Called by one thread at a time. Memory is uint8 `[bytes]`, of at least one byte, on the host
    or on a CUDA device. The library knows no streams: what was queued for memory is done when it
    is moved."""

    def register(self, memory: torch.Tensor) -> None:
        """Raises ConfigError where the library can't."""

    def deregister(self, memory: torch.Tensor) -> None:
        """Once for each `register` of this very tensor."""

    def key(self, memory: torch.Tensor) -> bytes:
        """The data by which peers reach this registered memory."""

    def remote(self) -> Remote: ...

    def give_up(self) -> None:
        """This end closes: transfers that run may be given up."""

    def close(self) -> None:
        """Call it when nothing is registered and no transfer runs."""
