"""Endpoints whose peers are reached over a control connection; what they expose is plugged in.

One thread accepts, one serves each accepted socket; a connection keeps its thread as its reader.
Memory that peers were told of is freed when the last of them has said that it uses it no more, or
is gone.
"""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass

import torch

from kvpool.transport import control_wire
from kvpool.transport.base import Callbacks, Region, RegionName
from kvpool.transport.control_wire import Grant, Packet
from kvpool.transport.exposure import Exposure, Fetch, PeerMemory
from kvpool.transport.peer_connection import PeerConnection
from kvpool.transport.rendezvous import Rendezvous
from kvpool.transport.threads import ThreadGroup
from kvrelay.errors import PeerError
from kvrelay.types import Incarnation

_FAREWELL_S = 2.0
"""How long `close` waits for peers to answer before it leaves all the same."""


@dataclass(slots=True)
class _Peer:
    memory: PeerMemory
    users: int = 0  # connections
    met: int = 0  # how many there have been


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
        self._peers: dict[str, _Peer] = {}  # by address
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
        except (OSError, PeerError):
            sock.close()
            raise
        self._threads.start(f"{self.address} <- {address}", lambda: self._deliver(connection))
        return connection

    def _shake_hands(self, sock: socket.socket, address: str) -> PeerConnection:
        connection = self._take_in(sock, address)
        try:
            control_wire.introduce(sock, Packet.HELLO, self.address, address)
            control_wire.welcomed(sock, address)
            self._open(connection)
        except (OSError, PeerError):
            self._forget(connection)
            raise
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
        """Wait for the peers' ends, but not for that of the thread which closes."""
        here = threading.current_thread()
        others = {c for c in connections if c.thread is not here}
        with self._changed:
            self._changed.wait_for(lambda: not others & self._connections, _FAREWELL_S)
        for connection in connections:
            connection.abandon()

    def _accept(self) -> None:
        with self._rendezvous.listener as listener:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    if self._closed:
                        return
                    raise
                self._greet(sock)

    def _greet(self, sock: socket.socket) -> None:
        with self._changed:
            if self._closed:
                sock.close()
                return
            sock.settimeout(control_wire.HANDSHAKE_TIMEOUT_S)
            self._greeting.add(sock)
            self._threads.start(f"{self.address} serves", lambda: self._serve(sock))

    def _serve(self, sock: socket.socket) -> None:
        """Run by the thread of an accepted socket."""
        try:
            self._rendezvous.admit(sock)
            connection = self._answer(sock)
        except (OSError, PeerError):
            connection = None  # the peer was told why, or is gone
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
        """Before the peer can ask for a region: from here on it may hold any."""
        peer = self._use(peer_address)
        connection = PeerConnection(sock, peer.memory, peer_address, self._send_timeout_s)
        with self._changed:
            self._connections.add(connection)
            closed = self._closed
        if closed:
            self._forget(connection)
            raise PeerError(f"{self.address} is closed")
        return connection

    def _open(self, connection: PeerConnection) -> None:
        """Once the peer counts it too. All of the peer's regions are asked for anew: of those that
        went before no one has told. The peer hears what went here meanwhile."""
        self._peers[connection.peer_address].memory.rest()
        with self._changed:
            connection.open()
            retired = [name for name, held in self._retiring.items() if connection in held]
        for name in retired:
            connection.reply(Packet.RETIRE, name.encode())

    def _use(self, address: str) -> _Peer:
        with self._changed:
            peer = self._peers.get(address)
            if peer is None:
                peer = _Peer(self._exposure.peer(address, self._fetcher(address)))
                self._peers[address] = peer
            peer.users += 1
            peer.met += 1
            return peer

    def _welcome(self, sock: socket.socket, connection: PeerConnection) -> PeerConnection:
        try:
            control_wire.introduce(sock, Packet.WELCOME, self.address, connection.peer_address)
            self._open(connection)
        except (OSError, PeerError):
            self._forget(connection)
            raise
        return connection

    def _grant(self, sock: socket.socket, region: RegionName) -> None:
        with self._changed:
            grant = self._exposure.grant(region, sock) if region in self._regions else None
            if grant is None:
                control_wire.send(sock, Packet.REFUSE, b"no such region")
            else:
                control_wire.send_grant(sock, grant)

    def _fetcher(self, address: str) -> Fetch:
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
            self._peers[connection.peer_address].users -= 1
            self._changed.notify_all()
        self._rest()

    def _rest(self) -> None:
        """Peers without a connection. Not under the lock: a peer's memory may wait for the peer."""
        with self._changed:
            resting = [(a, peer, peer.met) for a, peer in self._peers.items() if not peer.users]
        for address, peer, met in resting:
            forgettable = peer.memory.rest()
            with self._changed:
                if forgettable and peer.met == met and self._peers.get(address) is peer:
                    del self._peers[address]

    def _let_go(self, connection: PeerConnection, region: RegionName) -> None:
        with self._changed:
            if region in self._retiring:
                self._retiring[region].discard(connection)
            self._free_retired()

    def _free_retired(self) -> None:
        for name in [name for name, holders in self._retiring.items() if not holders]:
            del self._retiring[name]
            self._exposure.free(name)
