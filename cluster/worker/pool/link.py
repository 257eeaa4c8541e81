"""A worker's links to pool nodes. The link to the node of its own host is tried again while there
is no node.

PoolEndpoints is the worker's end of all these links. Its callbacks come on transport threads and go
to the link that opened the connection.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from cluster.worker.pool.outbox import Outbox
from kvpool.core.fetch.client_events import OWN_NODE, FromNode, PoolJoined, PoolLost
from kvpool.core.node.messages import FromPool, PoolHello, PoolRefused, PoolWelcome, ToPool
from kvpool.transport.endpoints import EndpointOptions, Endpoints, SharedRegion
from kvpool.transport.link_kind import LinkKind
from kvpool.transport.peer.base import Callbacks, Connection
from kvpool.wire.pool import Assembler
from kvrelay.errors import PeerError
from kvrelay.types import WIRE_VERSION, Incarnation

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCallbacks:
    received: Callable[[Connection, bytes], None]
    lost: Callable[[Connection], None]


class PoolEndpoints:
    """`schemes` in order of preference. Thread safe."""

    def __init__(
        self,
        schemes: Sequence[str],
        incarnation: Incarnation,
        options: EndpointOptions,
        require: Collection[LinkKind] = (),
    ) -> None:
        """`require`: the kinds of links to other hosts. Blocks pass through host memory. Raises
        ConfigError when none can be used."""
        self._lock = threading.Lock()
        self._links: dict[Connection, LinkCallbacks] = {}
        callbacks = Callbacks(
            on_connect=lambda connection: connection.close(),  # no one is to call a worker here
            on_message=self._received,
            on_lost=self._lost,
        )
        own = Incarnation(f"{incarnation}-pool")
        self._endpoints = Endpoints(
            schemes, own, callbacks, options=replace(options, device="cpu"), require=_kinds(require)
        )

    def connect(self, addresses: Sequence[str], link: LinkCallbacks) -> Connection:
        """The node sends nothing before its first message from here. Raises PeerError."""
        connection = self._endpoints.connect(addresses)
        with self._lock:
            self._links[connection] = link
        return connection

    def forget(self, connection: Connection) -> None:
        """The connection is closed, or will be; later messages are ignored."""
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


FIRST_RETRY_S = 0.2
LAST_RETRY_S = 5.0
REFUSED_RETRY_S = 30.0
SOON_S = 30.0
"""A pool node may start after the workers of its host: its absence is not logged before this."""


def _kinds(require: Collection[LinkKind]) -> set[LinkKind]:
    if not require:
        return set()
    far = {LinkKind.RDMA if kind is LinkKind.GPUDIRECT else kind for kind in require}
    return far | {LinkKind.SHM}


class PoolLink:
    """Posts PoolJoined, FromNode and PoolLost; PoolJoined and PoolLost alternate. To the `node` of
    another host it connects once. Then one PoolLost reports its end, even if it never joined.
    Thread safe."""

    def __init__(
        self,
        endpoints: PoolEndpoints,
        addresses: Sequence[str],
        hello: PoolHello,
        post: Callable[[PoolJoined | PoolLost | FromNode], None],
        node: Incarnation = OWN_NODE,
    ) -> None:
        self._endpoints = endpoints
        self._addresses = tuple(addresses)
        self._name = ", ".join(addresses)
        self._hello = hello
        self._node = node
        self._post = post
        self._changed = threading.Condition()
        self._connection: Connection | None = None
        self._outbox: Outbox | None = None
        self._assembler = Assembler()
        self._joined = False
        self._closing = False
        self._refusal = ""
        self._soon_until_s = time.monotonic() + SOON_S
        self._callbacks = LinkCallbacks(
            received=self._received,
            lost=lambda connection: self._lost(connection, "the pool node is gone"),
        )
        self._thread = threading.Thread(target=self._run, name="kvrelay-pool-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: ToPool) -> None:
        """Never waits; without a node the message is dropped."""
        with self._changed:
            outbox = self._outbox if self._joined else None
        if outbox is not None:
            outbox.put(message)

    def connection(self) -> Connection:
        """For the transfers that the node has granted. Raises PeerError when it is gone."""
        with self._changed:
            connection = self._connection if self._joined else None
        if connection is None:
            raise PeerError("no pool node is connected")
        return connection

    def end(self) -> None:
        """Sends what waits, then closes the connection. Never waits."""
        with self._changed:
            self._closing = True
            outbox = self._outbox
            self._changed.notify_all()
        if outbox is not None:
            outbox.finish()

    def close(self) -> None:
        """`end`, and waits for it."""
        self.end()
        with self._changed:
            outbox = self._outbox
        if outbox is not None:
            outbox.join()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        if self._node == OWN_NODE:
            self._stay_connected()
            return
        joined = self._connect() and self._wait_until_gone()
        if not joined and not self._closing:
            self._post(PoolLost(node=self._node, reason=self._refusal or "it could not be reached"))

    def _stay_connected(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._closing:
            if self._connect():
                joined = self._wait_until_gone()
                retry_s = FIRST_RETRY_S if joined else REFUSED_RETRY_S
            with self._changed:
                self._changed.wait_for(lambda: self._closing, retry_s)
            retry_s = min(2 * retry_s, max(retry_s, LAST_RETRY_S))

    def _connect(self) -> bool:
        try:
            connection = self._endpoints.connect(self._addresses, self._callbacks)
        except PeerError as error:
            self._not_connected(str(error))
            return False
        with self._changed:
            self._connection = connection
            self._assembler = Assembler()
            self._outbox = Outbox(connection, lambda reason: self._lost(connection, reason))
            self._outbox.put(self._hello)
        return True

    def _not_connected(self, reason: str) -> None:
        """Logs each reason once, unless the node of this host may come soon."""
        if self._node == OWN_NODE and time.monotonic() < self._soon_until_s:
            return
        if reason != self._refusal:
            log.info("no pool node: %s", reason)
        self._refusal = reason

    def _wait_until_gone(self) -> bool:
        """True if the node had accepted this worker."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._joined or self._connection is None or self._closing
            )
            had_joined = self._joined
            self._changed.wait_for(lambda: self._connection is None or self._closing)
            return had_joined

    def _received(self, connection: Connection, part: bytes) -> None:
        try:
            message = self._assembler.add(part)
            if message is not None:
                self._heard(message)
        except PeerError as error:
            self._lost(connection, str(error))

    def _heard(self, message: object) -> None:
        match message:
            case PoolWelcome():
                self._welcomed(message)
            case PoolRefused(reason=reason):
                if reason != self._refusal:
                    log.warning("the pool node at %s refuses this worker: %s", self._name, reason)
                self._refusal = reason
            case _:
                if not self._joined or not isinstance(message, FromPool):
                    raise PeerError("the pool node broke the protocol")
                self._post(FromNode(node=self._node, message=message))

    def _welcomed(self, welcome: PoolWelcome) -> None:
        if welcome.wire_version != WIRE_VERSION:
            raise PeerError(
                f"the pool node speaks wire version {welcome.wire_version}, this worker "
                f"{WIRE_VERSION}"
            )
        if self._node not in (OWN_NODE, welcome.incarnation):
            raise PeerError(f"expected pool node {self._node}, found {welcome.incarnation}")
        log.info("pool node %s joined (%s)", welcome.incarnation, self._name)
        with self._changed:
            self._joined = True
            self._refusal = ""
            self._changed.notify_all()
        self._post(PoolJoined(node=self._node, welcome=welcome))

    def _lost(self, connection: Connection, reason: str) -> None:
        self._endpoints.forget(connection)
        connection.close()
        with self._changed:
            if self._connection is not connection:
                return
            joined, self._joined = self._joined, False
            self._refusal = self._refusal or reason
            outbox, self._outbox, self._connection = self._outbox, None, None
            self._changed.notify_all()
        if outbox is not None:
            outbox.finish()
        if joined:
            log.warning("pool node at %s lost: %s", self._name, reason)
            self._post(PoolLost(node=self._node, reason=reason))
