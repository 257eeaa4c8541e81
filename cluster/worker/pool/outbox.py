"""The send queue of one pool connection; its own thread waits for a slow reader."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from kvpool.core.node.messages import PoolMessage
from kvpool.transport.peer.base import Connection
from kvpool.wire.pool import encode
from kvrelay.errors import PeerError


class Outbox:
    def __init__(self, connection: Connection, failed: Callable[[str], None]) -> None:
        """`failed` is called on the queue's thread when the peer can't be reached any more."""
        self._connection = connection
        self._failed = failed
        self._messages: queue.SimpleQueue[PoolMessage | None] = queue.SimpleQueue()
        name = f"kvrelay-outbox {connection.peer_address}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, message: PoolMessage) -> None:
        """Keeps the order; never blocks."""
        self._messages.put(message)

    def finish(self) -> None:
        """Send everything in the queue, then close the connection. Idempotent."""
        self._messages.put(None)

    def join(self) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while (message := self._messages.get()) is not None:
                for part in encode(message):
                    self._connection.notify(part)
        except PeerError as error:
            self._failed(str(error))
        self._connection.close()
