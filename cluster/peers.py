"""A worker's links to other workers: connects, says hello, refuses what doesn't match.

Callbacks come on transport threads and only queue; everything else runs on the loop's thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from kvpool.handoff import FromPeer, PeerHello, PeerLost, PeerMessage, SendPeer
from kvpool.memory import KvMemory
from kvpool.peer_wire import decode, encode
from kvpool.transport.base import Callbacks, Connection, Endpoint
from kvpool.transport.registry import LOOPBACK_HOST, open_endpoint
from kvrelay.errors import ConfigError, PeerError
from kvrelay.types import Incarnation

log = logging.getLogger(__name__)


class PeerLinks:
    """# incarnation of a peer |-> the connection to it, once both have said hello"""

    def __init__(
        self,
        scheme: str,
        hello: PeerHello,
        post: Callable[[FromPeer | PeerLost], None],
        *,
        host: str = LOOPBACK_HOST,
        memory: KvMemory | None = None,
    ) -> None:
        """Peers may read `memory`, the KV pool, where the link can share it."""
        self._post = post
        self._lock = threading.Lock()
        self._by_peer: dict[Incarnation, Connection] = {}
        self._peer_of: dict[Connection, Incarnation] = {}
        callbacks = Callbacks(
            on_connect=lambda connection: None, on_message=self._received, on_lost=self._lost
        )
        self.endpoint: Endpoint = open_endpoint(scheme, hello.incarnation, callbacks, host=host)
        self._hello = replace(hello, kv=replace(hello.kv, region=self._shared(memory)))

    def _shared(self, memory: KvMemory | None) -> str:
        """The region over the whole pool; empty where the link can't have it."""
        try:
            return "" if memory is None else self.endpoint.adopt(memory.flat).name
        except ConfigError as error:
            log.info("KV is not read directly: %s", error)
            return ""

    @property
    def incarnation(self) -> Incarnation:
        """This worker's own."""
        return self._hello.incarnation

    def connection(self, peer: Incarnation) -> Connection:
        """Raises PeerError when there is none."""
        with self._lock:
            found = self._by_peer.get(peer)
        if found is None:
            raise PeerError(f"no connection to worker {peer}")
        return found

    def send(self, command: SendPeer) -> None:
        """Connect first if need be. A peer that can't be reached is reported as lost; an answer
        to one that is not connected (any more) goes nowhere, and it has been told or will ask."""
        try:
            connection = self._connected(command)
            if connection is not None:
                connection.notify(encode(command.message))
        except PeerError as error:
            self._give_up(command.peer, str(error))

    def notify(self, peer: Incarnation, message: PeerMessage) -> None:
        """Raises PeerError."""
        self.connection(peer).notify(encode(message))

    def _connected(self, command: SendPeer) -> Connection | None:
        with self._lock:
            known = self._by_peer.get(command.peer)
        if known is not None or command.address is None:
            return known
        connection = self.endpoint.connect(command.address)
        self._admit(connection, command.peer)
        connection.notify(encode(self._hello))
        return connection

    def _give_up(self, peer: Incarnation, reason: str) -> None:
        """The next message connects anew; closing tells the peer, so both sides start over."""
        with self._lock:
            connection = self._by_peer.pop(peer, None)
            if connection is not None:
                self._peer_of.pop(connection, None)
            self._post(PeerLost(peer=peer, reason=reason))
        if connection is not None:
            connection.close()

    def _admit(self, connection: Connection, peer: Incarnation) -> None:
        with self._lock:
            self._by_peer[peer] = connection
            self._peer_of[connection] = peer

    def _received(self, connection: Connection, payload: bytes) -> None:
        try:
            message = decode(payload)
            if isinstance(message, PeerHello):
                self._greeted(connection, message)
                return
            with self._lock:
                peer = self._peer_of.get(connection)
            if peer is None:
                raise PeerError("a peer spoke before its hello")
        except PeerError as error:
            self._drop(connection, str(error))
            return
        self._post(FromPeer(peer=peer, message=message))

    def _greeted(self, connection: Connection, theirs: PeerHello) -> None:
        with self._lock:
            expected = self._peer_of.get(connection)
        if expected is None:  # they connected to us
            self._admit(connection, theirs.incarnation)
            connection.notify(encode(self._hello))
        elif expected != theirs.incarnation:
            raise PeerError(f"worker {expected} is gone; {theirs.incarnation} is in its place")
        self._check(theirs)
        self._post(FromPeer(peer=theirs.incarnation, message=theirs))

    def _check(self, theirs: PeerHello) -> None:
        ours = self._hello
        for name in ("wire_version", "fingerprint", "physical_format"):
            mine, other = getattr(ours, name), getattr(theirs, name)
            if mine != other:
                raise PeerError(
                    f"worker {theirs.incarnation} has {name} {other}, this one {mine}: both must "
                    "run the same kvrelay, model and dtype"
                )

    def _drop(self, connection: Connection, reason: str) -> None:
        log.error("refused a peer: %s", reason)
        connection.close()
        self._forget(connection, reason)

    def _lost(self, connection: Connection) -> None:
        self._forget(connection, f"the connection to worker {connection.peer_address} was lost")

    def _forget(self, connection: Connection, reason: str) -> None:
        with self._lock:
            peer = self._peer_of.pop(connection, None)
            if peer is None or self._by_peer.get(peer) is not connection:
                return
            del self._by_peer[peer]
            self._post(
                PeerLost(peer=peer, reason=reason)
            )  # before any hello of its next connection

    def close(self) -> None:
        self.endpoint.close()
