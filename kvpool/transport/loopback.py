"""Within one process: endpoints find each other in a table, and a region's window is the region
itself.

Each side of a connection has a bounded inbox and one thread that delivers from it. So a callback
never runs on the caller's stack, and a peer that does not read slows the sender down.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch

from kvpool.transport.mapped import windowed
from kvpool.transport.peer.base import (
    MAX_MESSAGE_BYTES,
    Callbacks,
    Read,
    Region,
    RegionName,
    RegionWrite,
)
from kvpool.transport.peer.endpoint import ThreadGroup
from kvrelay.errors import PeerError
from kvrelay.types import Incarnation

_INBOX_MESSAGES = 64

_table: dict[str, LoopbackEndpoint] = {}  # address |-> endpoint
_table_lock = threading.Lock()


class _Inbox:
    """Messages on their way to one side. Once ended it accepts none, but still delivers those it
    holds."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    def put(self, payload: bytes, timeout_s: float) -> None:
        with self._changed:
            room = self._changed.wait_for(self._has_room, timeout_s)
            if self._ended:
                raise PeerError("the loopback peer is gone")
            if not room:
                raise PeerError(f"the loopback peer has read nothing for {timeout_s} s")
            self._messages.append(payload)
            self._changed.notify_all()

    def get(self) -> bytes | None:
        """The next message; None when ended and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._ended)
            self._changed.notify_all()
            return self._messages.popleft() if self._messages else None

    def end(self, *, drop: bool = False) -> None:
        with self._changed:
            self._ended = True
            if drop:
                self._messages.clear()
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._ended or len(self._messages) < _INBOX_MESSAGES


class LoopbackConnection:
    def __init__(self, own: LoopbackEndpoint, peer: LoopbackEndpoint, inbox: _Inbox, out: _Inbox):
        self._own = own
        self._peer = peer
        self._inbox = inbox
        self._out = out
        self._closed = False

    @property
    def peer_address(self) -> str:
        return self._peer.address

    def window(self, region: RegionName) -> torch.Tensor:
        if self._inbox.ended:
            raise PeerError(f"{self.peer_address} is gone")
        return self._peer.memory_of(region)

    def write(self, region: RegionName, offset: int, source: torch.Tensor) -> None:
        self.write_many([RegionWrite(region, offset, source)])

    def read(self, region: RegionName, offset: int, target: torch.Tensor) -> None:
        self.read_many([Read(region, offset, target)])

    def write_many(self, writes: Sequence[RegionWrite]) -> None:
        windowed.write(self.window, writes)

    def read_many(self, reads: Sequence[Read]) -> None:
        windowed.read(self.window, reads)

    def notify(self, payload: bytes) -> None:
        assert len(payload) <= MAX_MESSAGE_BYTES, len(payload)
        self._out.put(payload, self._own.send_timeout_s)

    def close(self) -> None:
        self._closed = True
        self._out.end()
        self._inbox.end(drop=True)

    def deliver(self, callbacks: Callbacks, *, accepted: bool) -> None:
        """Runs on this side's thread until either side closes."""
        if accepted:
            callbacks.on_connect(self)
        while (payload := self._inbox.get()) is not None:
            callbacks.on_message(self, payload)
        self._own.forget(self)
        if not self._closed:
            self._out.end()
            callbacks.on_lost(self)


class LoopbackEndpoint:
    staging_bytes = 0

    def __init__(self, incarnation: Incarnation, callbacks: Callbacks, send_timeout_s: float):
        self._incarnation = incarnation
        self._callbacks = callbacks
        self.send_timeout_s = send_timeout_s
        self._lock = threading.Lock()
        self._regions: dict[RegionName, torch.Tensor] = {}
        self._registered = 0
        self._connections: set[LoopbackConnection] = set()
        self._threads = ThreadGroup()
        self._closed = False
        with _table_lock:
            assert self.address not in _table, f"{self.address} is already open"
            _table[self.address] = self

    @property
    def address(self) -> str:
        return f"loopback:{self._incarnation}"

    def register(self, nbytes: int) -> Region:
        return self.adopt(torch.zeros(nbytes, dtype=torch.uint8))

    def adopt(self, memory: torch.Tensor) -> Region:
        """Accepts any memory of this process."""
        assert memory.dtype is torch.uint8 and memory.is_contiguous()
        with self._lock:
            assert not self._closed
            self._registered += 1
            name = RegionName(f"kvrelay-{self._incarnation}-{self._registered}")
            self._regions[name] = memory
        return Region(name, memory)

    def deregister(self, region: Region) -> None:
        with self._lock:
            self._regions.pop(region.name, None)

    def memory_of(self, region: RegionName) -> torch.Tensor:
        memory = self._regions.get(region)
        if memory is None:
            raise PeerError(f"{self.address} has no region {region} (any more)")
        return memory

    def connect(self, address: str) -> LoopbackConnection:
        with _table_lock:
            peer = _table.get(address)
        if peer is None:
            raise PeerError(f"no one listens at {address}; is that worker in this process?")
        here, there = _Inbox(), _Inbox()
        near = LoopbackConnection(self, peer, here, there)
        peer.take_in(LoopbackConnection(peer, self, there, here), accepted=True)
        self.take_in(near, accepted=False)
        return near

    def take_in(self, connection: LoopbackConnection, *, accepted: bool) -> None:
        with self._lock:
            if self._closed:
                connection.close()
                raise PeerError(f"{self.address} is closed")
            self._connections.add(connection)
            self._threads.start(
                f"{self.address} <- {connection.peer_address}",
                lambda: connection.deliver(self._callbacks, accepted=accepted),
            )

    def forget(self, connection: LoopbackConnection) -> None:
        with self._lock:
            self._connections.discard(connection)

    def close(self) -> None:
        with _table_lock:
            if _table.get(self.address) is self:
                del _table[self.address]
        with self._lock:
            self._closed = True
            connections = list(self._connections)
            self._regions.clear()
        for connection in connections:
            connection.close()
        self._threads.join()
