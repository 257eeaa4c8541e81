"""A pool node's links: to workers of its own host over shared memory, to others as configured.

Callbacks come on transport threads and only queue.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cluster.core.settings import pool_name
from cluster.worker.pool.outbox import Outbox
from kvpool.core.node.messages import PoolMessage
from kvpool.transport.endpoints import EndpointOptions
from kvpool.transport.mapped import memfd
from kvpool.transport.peer.base import Callbacks, Connection, Endpoint, RegionName
from kvpool.transport.registry import open_endpoint
from kvpool.wire.pool import Assembler
from kvrelay.errors import ConfigError, PeerError
from kvrelay.types import Incarnation

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """`region` is the peer's name of the host tier on its link."""

    connection: Connection
    region: RegionName
    message: PoolMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    connection: Connection
    reason: str


class PoolWorkers:
    """`memory` is the host tier, registered as one region on each link."""

    def __init__(
        self,
        cluster: str,
        incarnation: Incarnation,
        *,
        memory_bytes: int,
        transports: Sequence[str],
        options: EndpointOptions,
        post: Callable[[Heard | Gone], None],
    ) -> None:
        """Raises ConfigError when another pool node of the cluster runs on this host, or a
        transport can't be opened."""
        self._post = post
        self._lock = threading.Lock()
        self._assemblers: dict[Connection, Assembler] = {}
        self._outboxes: dict[Connection, Outbox] = {}
        self._endpoints: list[Endpoint] = []
        try:
            self._open(partial(_shm, cluster, incarnation))
            memory = memfd.allocate(memory_bytes, f"kvrelay-{pool_name(cluster)}", lazily=True)
            self._regions = [self._endpoints[0].adopt(memory)]
            for scheme in transports:
                self._open(partial(options.open, scheme, incarnation))
                self._regions.append(self._endpoints[-1].adopt(memory))
        except BaseException:
            self.close()
            raise
        self.memory: memoryview = memory.numpy().data

    def _open(self, opener: Callable[[Callbacks], Endpoint]) -> None:
        link = len(self._endpoints)
        callbacks = Callbacks(
            on_connect=lambda connection: None,
            on_message=lambda connection, part: self._received(link, connection, part),
            on_lost=lambda connection: self._lost(connection, "its connection was lost"),
        )
        self._endpoints.append(opener(callbacks))

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(endpoint.address for endpoint in self._endpoints)

    @property
    def far_addresses(self) -> tuple[str, ...]:
        """The addresses for workers of other hosts."""
        return self.addresses[1:]

    def tell(self, connection: Connection, message: PoolMessage) -> None:
        """Never waits; a worker that doesn't read counts as lost after a while."""
        with self._lock:
            outbox = self._outboxes.get(connection)
            if outbox is None:
                outbox = Outbox(connection, lambda reason: self._lost(connection, reason))
                self._outboxes[connection] = outbox
        outbox.put(message)

    def drop(self, connection: Connection) -> None:
        """Closes the link once everything is sent; later messages of the worker are ignored."""
        with self._lock:
            outbox = self._outboxes.pop(connection, None)
            self._assemblers.pop(connection, None)
        if outbox is not None:
            outbox.finish()
        else:
            connection.close()

    def close(self) -> None:
        with self._lock:
            outboxes = list(self._outboxes.values())
            self._outboxes.clear()
        for outbox in outboxes:
            outbox.finish()
            outbox.join()
        for endpoint in self._endpoints:
            endpoint.close()

    def _received(self, link: int, connection: Connection, part: bytes) -> None:
        with self._lock:
            assembler = self._assemblers.setdefault(connection, Assembler())
        try:
            message = assembler.add(part)
        except PeerError as error:
            self._lost(connection, str(error))
            return
        if message is not None:
            region = self._regions[link].name
            self._post(Heard(connection=connection, region=region, message=message))

    def _lost(self, connection: Connection, reason: str) -> None:
        self.drop(connection)
        self._post(Gone(connection=connection, reason=reason))


def _shm(cluster: str, incarnation: Incarnation, callbacks: Callbacks) -> Endpoint:
    try:
        return open_endpoint("shm", incarnation, callbacks, name=pool_name(cluster))
    except ConfigError as error:
        raise ConfigError(
            f"a pool node of the cluster {cluster} runs on this host already ({error}): stop it or "
            "use another --name"
        ) from error
