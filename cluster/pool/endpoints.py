"""A worker's end of its links to pool nodes: one for that of its host and those of others.

Callbacks come on transport threads and go to the link that opened the connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvpool.transport.base import Callbacks, Connection
from kvpool.transport.endpoints import EndpointOptions, Endpoints, SharedRegion
from kvpool.transport.fabric import LinkKind
from kvrelay.types import Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCallbacks:
    received: Callable[[Connection, bytes], None]
    lost: Callable[[Connection], None]


class PoolEndpoints:
    """`schemes` by preference. Thread safe."""

    def __init__(
        self,
        schemes: Sequence[str],
        incarnation: Incarnation,
        options: EndpointOptions,
        require: Collection[LinkKind] = (),
    ) -> None:
        """`require`: of links to other hosts. Raises ConfigError when none can be used."""
        self._lock = threading.Lock()
        self._links: dict[Connection, LinkCallbacks] = {}
        callbacks = Callbacks(
            on_connect=lambda connection: connection.close(),  # no one is to call a worker here
            on_message=self._received,
            on_lost=self._lost,
        )
        own = Incarnation(f"{incarnation}-pool")
        kinds = {*require, LinkKind.SHM} if require else ()
        self._endpoints = Endpoints(schemes, own, callbacks, options=options, require=kinds)

    def connect(self, addresses: Sequence[str], link: LinkCallbacks) -> Connection:
        """Nothing comes before the first message to it. Raises PeerError."""
        connection = self._endpoints.connect(addresses)
        with self._lock:
            self._links[connection] = link
        return connection

    def forget(self, connection: Connection) -> None:
        """It is closed, or will be: nothing more is heard of it."""
        with self._lock:
            self._links.pop(connection, None)

    def register(self, nbytes: int) -> SharedRegion:
        return self._endpoints.register(nbytes)

    def deregister(self, region: SharedRegion) -> None:
        self._endpoints.deregister(region)

    def close(self) -> None:
        self._endpoints.close()

    def _received(self, connection: Connection, part: bytes) -> None:
        with self._lock:
            link = self._links.get(connection)
        if link is not None:
            link.received(connection, part)

    def _lost(self, connection: Connection) -> None:
        with self._lock:
            link = self._links.pop(connection, None)
        if link is not None:
            link.lost(connection)
