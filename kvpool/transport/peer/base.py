"""The contract of a link between two workers. Every transport keeps it; one test suite checks all.

An endpoint belongs to one process. It owns registered regions, and talks to peers over connections.
Everything is thread safe and needs no event loop. Messages arrive by callback on a thread of the
transport, so a callback only queues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

import torch

RegionName = NewType("RegionName", str)
"""The peers' name of a registered region of one endpoint. Unique for the endpoint's life."""

MAX_MESSAGE_BYTES = 64 * 1024
SEND_TIMEOUT_S = 5.0
"""`notify` raises when a peer has not read for this long."""


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
    """A connection to one peer. Its writes and notifications keep their order."""

    @property
    def peer_address(self) -> str: ...

    def write(self, region: RegionName, offset: int, source: torch.Tensor) -> None:
        """Copies `source` (any dtype, contiguous) into the peer's region; visible to the peer
        before any later `notify`. Raises PeerError when the peer or the region is gone."""

    def read(self, region: RegionName, offset: int, target: torch.Tensor) -> None:
        """Copies from the peer's region into `target` (contiguous)."""

    def write_many(self, writes: Sequence[RegionWrite]) -> None:
        """All writes, posted as one batch if the link has batches, in any order. Visibility and
        errors are those of `write`; after an error some may have taken place."""

    def read_many(self, reads: Sequence[Read]) -> None:
        """All reads, posted as one batch if the link has batches; raises like `read`."""

    def window(self, region: RegionName) -> torch.Tensor | None:
        """The peer's region as local memory (uint8), if the link can map it; else None. The caller
        waits for copies that it queued on it (on a device) before `notify`."""

    def notify(self, payload: bytes) -> None:
        """Delivers `payload` (at most 64 KiB), whole and in order, to the peer's `on_message`.
        Blocks while the peer has too much unread. If that lasts `SEND_TIMEOUT_S`, or the peer is
        gone, it raises PeerError and delivers nothing."""

    def close(self) -> None:
        """Idempotent. Copies of this connection end first: they fail, or go on to their end where
        the link can't stop them. The other side's `on_lost` is called after everything that was
        sent to it. This side's is not called, and messages that it has not received yet are
        dropped."""


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
        """`scheme:rest`, the address that a peer passes to `connect`."""

    @property
    def staging_bytes(self) -> int:
        """Bytes that the transport itself holds now, for transfers between unregistered memory and
        a peer's region."""

    def register(self, nbytes: int) -> Region: ...

    def adopt(self, memory: torch.Tensor) -> Region:
        """Registers memory (uint8, contiguous) that was allocated elsewhere and stays in place.
        Raises ConfigError when the link cannot expose it: see each transport."""

    def deregister(self, region: Region) -> None:
        """Later writes of peers raise or have no effect; the memory is freed once no process maps
        it."""

    def connect(self, address: str) -> Connection:
        """Raises PeerError, with the address, when nobody listens there."""

    def close(self) -> None:
        """Idempotent; closes every connection, frees every region, joins every thread."""
