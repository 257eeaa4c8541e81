"""Registered memory that pieces are sent from, over links that can't map the peer's slab. It is
registered on first use, and then used again."""

from __future__ import annotations

import threading
from collections import Counter

from kvpool.transport.endpoints import Endpoints, SharedRegion
from kvpool.transport.peer.base import Connection
from kvrelay.errors import PeerError

OF_A_CONNECTION = 2
"""At most: one is filled while the other is sent."""
SEND_BUFFERS = 4
"""In all, before a connection that has one must wait for its own. Each always gets one, so that a
peer that hangs holds up no other."""


class SendBuffers:
    """Thread safe."""

    def __init__(self, endpoints: Endpoints, buffer_bytes: int) -> None:
        self._endpoints = endpoints
        self._buffer_bytes = buffer_bytes
        self._changed = threading.Condition()
        self._idle: list[SharedRegion] = []
        self._used: Counter[int] = Counter()  # id of a connection |-> buffers
        self._closed = False

    def take(self, connection: Connection, needed_bytes: int) -> SharedRegion:
        """At least so large. Waits while the connection has as many as it may. Raises PeerError
        once closed."""
        user = id(connection)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._may_take(user))
            if self._closed:
                raise PeerError("this worker closes its links")
            self._used[user] += 1
            buffer = self._idle.pop() if self._idle else None
        return self._sized(buffer, needed_bytes)

    def give_back(self, connection: Connection, buffer: SharedRegion) -> None:
        with self._changed:
            self._used -= Counter([id(connection)])
            self._idle.append(buffer)
            self._changed.notify_all()
            if self._closed:
                self._free_idle()

    def close(self) -> None:
        """Nobody waits any more. Those in use are freed as they are given back."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._free_idle()

    def _may_take(self, user: int) -> bool:
        used = self._used[user]
        return not used or (used < OF_A_CONNECTION and self._used.total() < SEND_BUFFERS)

    def _sized(self, buffer: SharedRegion | None, needed_bytes: int) -> SharedRegion:
        """A peer's slabs may be larger than this worker's."""
        if buffer is not None and buffer.memory.numel() >= needed_bytes:
            return buffer
        if buffer is not None:
            self._endpoints.deregister(buffer)
        return self._endpoints.register(max(self._buffer_bytes, needed_bytes))

    def _free_idle(self) -> None:
        for buffer in self._idle:
            self._endpoints.deregister(buffer)
        self._idle.clear()
