"""What a link between two workers can do. Every transport keeps this contract; one suite tests all.

An endpoint belongs to one process. It owns registered regions, and speaks to peers over
connections. Everything is thread safe and needs no event loop: messages arrive by callback on a
thread of the transport, so a callback only queues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

import torch

RegionName = NewType("RegionName", str)
"""A registered region of one endpoint, as told to a peer. Unique for the endpoint's life."""

MAX_MESSAGE_BYTES = 64 * 1024
SEND_TIMEOUT_S = 5.0
"""How long `notify` waits for a peer that does not read before it raises."""


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of this process that peers may be lent."""

    name: RegionName
    memory: torch.Tensor  # uint8 [bytes]


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes `[offset, offset + target's)` of the peer's region, into `target` (contiguous)."""

    region: RegionName
    offset: int
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class RegionWrite:
    """`source` (contiguous) into the peer's region, from its byte `offset` on."""

    region: RegionName
    offset: int
    source: torch.Tensor


class Connection(Protocol):
    """One peer. Writes and notifications of one connection keep their order."""

    @property
    def peer_address(self) -> str: ...

    def write(self, region: RegionName, offset: int, source: torch.Tensor) -> None:
        """Copy `source` (any dtype, contiguous) into the peer's region; visible to the peer before
        any later `notify`. Raises PeerError when the peer or the region is gone."""

    def read(self, region: RegionName, offset: int, target: torch.Tensor) -> None:
        """Copy from the peer's region into `target` (contiguous)."""

    def write_many(self, writes: Sequence[RegionWrite]) -> None:
        """All of them, posted as one batch where the link has batches. In no order among each
        other; visible and raising as `write`, which may then have taken place in part."""

    def read_many(self, reads: Sequence[Read]) -> None:
        """All of them, posted as one batch where the link has batches; raises as `read`."""

    def window(self, region: RegionName) -> torch.Tensor | None:
        """The peer's region as local memory (uint8), where the link can map it; else None. Copies
        that are queued on it (on a device) are the caller's to wait for before `notify`."""

    def notify(self, payload: bytes) -> None:
        """Deliver `payload` (at most 64 KiB), whole and in order, to the peer's `on_message`.
        Blocks while the peer has too much unread; raises PeerError, and delivers nothing, when
        that lasts `SEND_TIMEOUT_S` or the peer is gone."""

    def close(self) -> None:
        """Idempotent. The other side's `on_lost` is called, after all that was sent to it; this
        side's is not, and what it has not yet been given is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """Called on a transport thread; must not block. `on_connect` is for connections that a peer
    opened, and comes before their first message."""

    on_connect: Callable[[Connection], None]
    on_message: Callable[[Connection, bytes], None]
    on_lost: Callable[[Connection], None]


class Endpoint(Protocol):
    """This process's end of one transport."""

    @property
    def address(self) -> str:
        """`scheme:rest`, what a peer passes to `connect`."""

    @property
    def staging_bytes(self) -> int:
        """Held now, by the transport itself, for transfers between memory that is not registered
        here and a peer's region."""

    def register(self, nbytes: int) -> Region: ...

    def adopt(self, memory: torch.Tensor) -> Region:
        """Register memory (uint8, contiguous) that was allocated elsewhere and is at rest in
        place. Raises ConfigError when the link cannot expose it: see each transport."""

    def deregister(self, region: Region) -> None:
        """Later writes of peers raise or go nowhere; the memory is freed once no one maps it."""

    def connect(self, address: str) -> Connection:
        """Raises PeerError, with the address, when no one listens there."""

    def close(self) -> None:
        """Idempotent; closes every connection, frees every region, joins every thread."""
