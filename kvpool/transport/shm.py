"""Between processes of one host (Linux): regions are memfds that the peer maps.

One thread accepts, one serves each accepted socket; a connection keeps its thread as its reader.
Nothing has a name in a file system, so nothing is left behind by a process that is killed.
"""

from __future__ import annotations

import socket
import threading

import torch

from kvpool.transport import memfd, shm_wire
from kvpool.transport.base import Callbacks, Region, RegionName
from kvpool.transport.shm_connection import ShmConnection
from kvpool.transport.shm_wire import Packet
from kvpool.transport.threads import ThreadGroup
from kvrelay.errors import PeerError
from kvrelay.types import Incarnation


class ShmEndpoint:
    def __init__(self, incarnation: Incarnation, callbacks: Callbacks, send_timeout_s: float):
        self._incarnation = incarnation
        self._callbacks = callbacks
        self._send_timeout_s = send_timeout_s
        self._lock = threading.Lock()
        self._regions: dict[RegionName, memfd.Loan] = {}
        self._registered = 0
        self._greeting: set[socket.socket] = set()
        self._connections: set[ShmConnection] = set()
        self._threads = ThreadGroup()
        self._closed = False
        self._listener = shm_wire.listen(self.address)
        self._threads.start(f"{self.address} accepts", self._accept)

    @property
    def address(self) -> str:
        return shm_wire.address_of(self._incarnation)

    def register(self, nbytes: int) -> Region:
        name = self._next_name()
        return self._lend(name, memfd.allocate(nbytes, name))

    def adopt(self, memory: torch.Tensor) -> Region:
        """All of it must be memory of `memfd.allocate`."""
        return self._lend(self._next_name(), memory)

    def deregister(self, region: Region) -> None:
        with self._lock:
            loan = self._regions.pop(region.name, None)
        if loan is not None:
            loan.retire()

    def connect(self, address: str) -> ShmConnection:
        sock = shm_wire.dial(address)
        try:
            shm_wire.introduce(sock, Packet.HELLO, self.address)
            peer_address = shm_wire.welcomed(sock, address)
            connection = self._adopt(sock, peer_address)
        except (OSError, PeerError):
            sock.close()
            raise
        self._threads.start(f"{self.address} <- {address}", lambda: self._deliver(connection))
        return connection

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for sock in (*self._greeting, self._listener):
                shm_wire.shut_down(sock)
            connections = list(self._connections)
            regions, self._regions = list(self._regions.values()), {}
        for connection in connections:
            connection.close()
        for loan in regions:
            loan.retire()
        self._threads.join()

    def _next_name(self) -> RegionName:
        with self._lock:
            self._registered += 1
            return RegionName(f"kvrelay-{self._incarnation}-{self._registered}")

    def _lend(self, name: RegionName, memory: torch.Tensor) -> Region:
        loan = memfd.lend(memory)
        with self._lock:
            assert not self._closed
            self._regions[name] = loan
        return Region(name, memory)

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    sock, _ = self._listener.accept()
                except OSError:
                    if self._closed:
                        return
                    raise
                self._greet(sock)

    def _greet(self, sock: socket.socket) -> None:
        with self._lock:
            if self._closed or not shm_wire.same_user(sock):
                sock.close()
                return
            sock.settimeout(shm_wire.HANDSHAKE_TIMEOUT_S)
            self._greeting.add(sock)
            self._threads.start(f"{self.address} serves", lambda: self._serve(sock))

    def _serve(self, sock: socket.socket) -> None:
        """Run by the thread of an accepted socket: its first packet says what it is for."""
        try:
            connection = self._answer(sock)
        except (OSError, PeerError):
            connection = None  # the peer was told why, or is gone
        with self._lock:
            self._greeting.discard(sock)
            if connection is None:
                sock.close()
        if connection is not None:
            self._deliver(connection, accepted=True)

    def _answer(self, sock: socket.socket) -> ShmConnection | None:
        match shm_wire.receive(sock):
            case Packet.HELLO, payload:
                connection = self._adopt(sock, shm_wire.introduced(sock, payload))
                return self._welcome(sock, connection)
            case Packet.GET, name:
                self._grant(sock, RegionName(name.decode()))
        return None

    def _adopt(self, sock: socket.socket, peer_address: str) -> ShmConnection:
        connection = ShmConnection(sock, peer_address, self._send_timeout_s)
        with self._lock:
            if self._closed:
                raise PeerError(f"{self.address} is closed")
            self._connections.add(connection)
        return connection

    def _welcome(self, sock: socket.socket, connection: ShmConnection) -> ShmConnection:
        try:
            shm_wire.introduce(sock, Packet.WELCOME, self.address)
        except OSError:
            self._forget(connection)
            raise
        return connection

    def _grant(self, sock: socket.socket, region: RegionName) -> None:
        with self._lock:
            loan = self._regions.get(region)
            if loan is None:
                shm_wire.send(sock, Packet.REFUSE, b"no such region")
            else:
                shm_wire.grant(sock, loan)

    def _deliver(self, connection: ShmConnection, *, accepted: bool = False) -> None:
        connection.deliver(self._callbacks, accepted=accepted)
        self._forget(connection)

    def _forget(self, connection: ShmConnection) -> None:
        with self._lock:
            self._connections.discard(connection)
