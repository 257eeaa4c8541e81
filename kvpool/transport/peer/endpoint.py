"""Endpoints whose peers are reached over a control connection; the exposed memory is plugged in.

One thread accepts, and one serves each accepted socket; a connection keeps its thread as its
reader. Named threads are all joined at the endpoint's close. Memory that peers know is freed when
the last of them has stopped using it, or is gone.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvpool.transport.peer import control_wire
from kvpool.transport.peer.base import Callbacks, Region, RegionName
from kvpool.transport.peer.connection import KnownPeers, PeerConnection
from kvpool.transport.peer.control_wire import Grant, Packet
from kvpool.transport.peer.exposure import Exposure, FetchGrant
from kvpool.transport.peer.rendezvous import Rendezvous
from kvrelay.errors import PeerError
from kvrelay.types import Incarnation

log = logging.getLogger(__name__)


class ThreadGroup:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, name: str, run: Callable[[], None]) -> None:
        """Raises RuntimeError if the host has no thread left."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            thread.start()
            self._threads = [t for t in self._threads if t.is_alive()]
            self._threads.append(thread)

    def join(self) -> None:
        """Waits for all but the calling thread, which may be one of them (close in a callback)."""
        with self._lock:
            threads, self._threads = self._threads, []
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()


_LISTENS_NO_MORE = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)
"""Errors of `accept` that would repeat. All others concern one peer, or pass."""
MOST_GREETING = 64
"""Peers in their handshake, each on a thread; what comes beside them is closed."""
_REST_S = 0.05
"""Pause after a peer could not be accepted."""
_COPY_ENDS_S = 1.0
"""A new connection waits this long for a copy with the same peer."""
_FAREWELL_S = 2.0
"""`close` waits this long for peers to answer."""


class PeerEndpoint:
    def __init__(
        self,
        incarnation: Incarnation,
        callbacks: Callbacks,
        send_timeout_s: float,
        rendezvous: Rendezvous,
        exposure: Exposure,
    ) -> None:
        self._incarnation = incarnation
        self._callbacks = callbacks
        self._send_timeout_s = send_timeout_s
        self._rendezvous = rendezvous
        self._exposure = exposure
        self._changed = threading.Condition()
        self._regions: set[RegionName] = set()
        self._retiring: dict[RegionName, set[PeerConnection]] = {}  # |-> who may still use it
        self._registered = 0
        self._greeting: set[socket.socket] = set()
        self._connections: set[PeerConnection] = set()
        self._peers = KnownPeers(lambda address: exposure.peer(address, self._fetcher(address)))
        self._threads = ThreadGroup()
        self._closed = False
        self._threads.start(f"{self.address} accepts", self._accept)

    @property
    def address(self) -> str:
        return self._rendezvous.address

    @property
    def staging_bytes(self) -> int:
        return self._exposure.staging_bytes

    def register(self, nbytes: int) -> Region:
        name = self._next_name()
        return self._expose(name, self._exposure.allocate(nbytes, name))

    def adopt(self, memory: torch.Tensor) -> Region:
        assert memory.dtype is torch.uint8 and memory.is_contiguous()
        return self._expose(self._next_name(), memory)

    def deregister(self, region: Region) -> None:
        with self._changed:
            if region.name not in self._regions:
                return
            self._regions.remove(region.name)
            self._exposure.retire(region.name)
            holders = set(self._connections)
            self._retiring[region.name] = set(holders)
            self._free_retired()
            told = [connection for connection in holders if connection.is_open]
        for connection in told:
            connection.reply(Packet.RETIRE, region.name.encode())

    def connect(self, address: str) -> PeerConnection:
        sock = self._rendezvous.dial(address)
        try:
            connection = self._shake_hands(sock, address)
        except BaseException:
            sock.close()
            raise
        self._threads.start(f"{self.address} <- {address}", lambda: self._deliver(connection))
        return connection

    def _shake_hands(self, sock: socket.socket, address: str) -> PeerConnection:
        connection = self._take_in(sock, address)
        with self._forgotten_unless_open(connection):
            control_wire.introduce(sock, Packet.HELLO, self.address, address)
            control_wire.welcomed(sock, address)
            self._ask_anew(connection)
            self._open(connection)
        return connection

    def close(self) -> None:
        with self._changed:
            already, self._closed = self._closed, True
            for sock in (*self._greeting, self._rendezvous.listener):
                control_wire.shut_down(sock)
            connections, regions = list(self._connections), list(self._regions)
            self._regions.clear()
            for region in regions:
                self._exposure.retire(region)
        self._exposure.give_up()
        for connection in connections:
            connection.close()
        self._part_from(connections)
        self._threads.join()
        if not already:
            with self._changed:
                self._retiring.clear()
                self._exposure.close()

    def _next_name(self) -> RegionName:
        with self._changed:
            self._registered += 1
            return RegionName(f"kvrelay-{self._incarnation}-{self._registered}")

    def _expose(self, name: RegionName, memory: torch.Tensor) -> Region:
        with self._changed:
            assert not self._closed
            self._exposure.expose(name, memory)
            self._regions.add(name)
        return Region(name, memory)

    def _part_from(self, connections: list[PeerConnection]) -> None:
        """Waits for the peers' ends, but not for that of the thread which closes."""
        here = threading.current_thread()
        others = {c for c in connections if c.thread is not here}
        with self._changed:
            self._changed.wait_for(lambda: not others & self._connections, _FAREWELL_S)
        for connection in connections:
            connection.abandon()

    def _accept(self) -> None:
        failing = False
        with self._rendezvous.listener as listener:
            while True:
                try:
                    sock, _ = listener.accept()
                    self._greet(sock)
                except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                    if self._closed:
                        return
                    if isinstance(error, OSError) and error.errno in _LISTENS_NO_MORE:
                        raise
                    if not failing:
                        log.warning("%s can't accept a peer: %s", self.address, error)
                    failing = True
                    self._rest()
                else:
                    failing = False

    def _rest(self) -> None:
        """Waits: resources may be available soon, and the waiting peer is still to be accepted."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, _REST_S)

    def _greet(self, sock: socket.socket) -> None:
        with self._changed:
            if self._closed or len(self._greeting) >= MOST_GREETING:
                sock.close()
                return
            sock.settimeout(control_wire.HANDSHAKE_TIMEOUT_S)
            self._greeting.add(sock)
            try:
                self._threads.start(f"{self.address} serves", lambda: self._serve(sock))
            except RuntimeError:
                self._greeting.discard(sock)
                sock.close()
                raise

    def _serve(self, sock: socket.socket) -> None:
        """Runs on the thread of an accepted socket."""
        connection = None
        try:
            self._rendezvous.admit(sock)
            connection = self._answer(sock)
        except (OSError, PeerError):
            pass  # the peer was told why, or is gone
        finally:
            with self._changed:
                self._greeting.discard(sock)
                if connection is None:
                    sock.close()
        if connection is not None:
            self._deliver(connection, accepted=True)

    def _answer(self, sock: socket.socket) -> PeerConnection | None:
        match control_wire.receive(sock):
            case Packet.HELLO, payload:
                peer_address = control_wire.introduced(sock, payload, self.address)
                return self._welcome(sock, self._take_in(sock, peer_address))
            case Packet.GET, name:
                self._grant(sock, RegionName(name.decode(errors="replace")))
        return None

    def _take_in(self, sock: socket.socket, peer_address: str) -> PeerConnection:
        """Counts the connection before the handshake: from here on the peer may hold any region."""
        memory = self._peers.use(peer_address)
        connection = PeerConnection(sock, memory, peer_address, self._send_timeout_s)
        with self._changed:
            self._connections.add(connection)
            closed = self._closed
        if closed:
            self._forget(connection)
            raise PeerError(f"{self.address} is closed")
        return connection

    @contextmanager
    def _forgotten_unless_open(self, connection: PeerConnection) -> Iterator[None]:
        """Raises PeerError for an OSError."""
        try:
            yield
        except OSError as error:
            self._forget(connection)
            raise PeerError(f"{connection.peer_address} is gone: {error}") from error
        except BaseException:
            self._forget(connection)
            raise

    def _ask_anew(self, connection: PeerConnection) -> None:
        """Asks again for all of the peer's regions, once the peer counts the connection too:
        regions retired before were not reported. A copy over an earlier connection may hang."""
        address = connection.peer_address
        try:
            self._peers[address].rest(_COPY_ENDS_S)
        except PeerError as error:
            raise PeerError(f"{address}: {error}") from error

    def _open(self, connection: PeerConnection) -> None:
        """The peer learns which regions were retired in the meantime."""
        with self._changed:
            if self._closed:
                raise PeerError(f"{self.address} is closed")
            connection.open()
            retired = [name for name, held in self._retiring.items() if connection in held]
        for name in retired:
            connection.reply(Packet.RETIRE, name.encode())

    def _welcome(self, sock: socket.socket, connection: PeerConnection) -> PeerConnection:
        with self._forgotten_unless_open(connection):
            self._ask_anew(connection)
            control_wire.introduce(sock, Packet.WELCOME, self.address, connection.peer_address)
            self._open(connection)
        return connection

    def _grant(self, sock: socket.socket, region: RegionName) -> None:
        with self._changed:
            grant = self._exposure.grant(region, sock) if region in self._regions else None
            if grant is None:
                control_wire.send(sock, Packet.REFUSE, b"no such region")
            else:
                control_wire.send_grant(sock, grant)

    def _fetcher(self, address: str) -> FetchGrant:
        def fetch(region: RegionName) -> Grant:
            with self._rendezvous.dial(address) as sock:
                try:
                    control_wire.send(sock, Packet.GET, region.encode())
                    grant = control_wire.receive_grant(sock)
                except OSError as error:
                    reason = f"{address} did not answer for region {region}: {error}"
                    raise PeerError(reason) from error
            if grant is None:
                raise PeerError(f"{address} has no region {region} (any more)")
            return grant

        return fetch

    def _deliver(self, connection: PeerConnection, *, accepted: bool = False) -> None:
        connection.deliver(
            self._callbacks, lambda name: self._let_go(connection, name), accepted=accepted
        )
        self._forget(connection)

    def _forget(self, connection: PeerConnection) -> None:
        with self._changed:
            self._connections.discard(connection)
            for holders in self._retiring.values():
                holders.discard(connection)
            self._free_retired()
            self._changed.notify_all()
        self._peers.leave(connection.peer_address)

    def _let_go(self, connection: PeerConnection, region: RegionName) -> None:
        with self._changed:
            if region in self._retiring:
                self._retiring[region].discard(connection)
            self._free_retired()

    def _free_retired(self) -> None:
        for name in [name for name, holders in self._retiring.items() if not holders]:
            del self._retiring[name]
            self._exposure.free(name)
