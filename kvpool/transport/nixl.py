"""Between hosts, and the way to RDMA: KV by one-sided NIXL transfers, messages over TCP.

One thread accepts, one serves each accepted socket; a connection keeps its thread as its reader.
Memory that peers were told of is freed when the last of them has said that it writes there no more,
or is gone: not every link that UCX may choose stops a late write by itself.
"""

from __future__ import annotations

import socket
import threading

import torch

from kvpool.transport import nixl_wire
from kvpool.transport.base import Callbacks, Region, RegionName
from kvpool.transport.nixl_agent import Agent
from kvpool.transport.nixl_connection import NixlConnection
from kvpool.transport.nixl_peer import NixlPeer
from kvpool.transport.nixl_wire import Grant, Packet
from kvpool.transport.threads import ThreadGroup
from kvrelay.errors import ConfigError, PeerError
from kvrelay.types import Incarnation

_FAREWELL_S = 2.0
"""How long `close` waits for peers to answer before it leaves all the same."""


class NixlEndpoint:
    def __init__(
        self, incarnation: Incarnation, callbacks: Callbacks, send_timeout_s: float, host: str
    ) -> None:
        """Listens on `host`, which peers are told."""
        self._incarnation = incarnation
        self._callbacks = callbacks
        self._send_timeout_s = send_timeout_s
        self._changed = threading.Condition()
        self._agent = Agent(incarnation)
        self._regions: dict[RegionName, torch.Tensor] = {}
        self._retiring: dict[RegionName, tuple[torch.Tensor, set[NixlConnection]]] = {}
        self._registered = 0
        self._greeting: set[socket.socket] = set()
        self._connections: set[NixlConnection] = set()
        self._peers: dict[str, NixlPeer] = {}  # address |-> kept for as long as this endpoint
        self._threads = ThreadGroup()
        self._closed = False
        self._listener = nixl_wire.listen(host)
        self._address = nixl_wire.address_of(self._listener, host, incarnation)
        self._threads.start(f"{self.address} accepts", self._accept)

    @property
    def address(self) -> str:
        return self._address

    def register(self, nbytes: int) -> Region:
        region = self.adopt(torch.zeros(max(nbytes, 1), dtype=torch.uint8))
        return Region(region.name, region.memory[:nbytes])

    def adopt(self, memory: torch.Tensor) -> Region:
        """Any host memory of this process, of at least one byte."""
        assert memory.dtype is torch.uint8 and memory.is_contiguous() and memory.numel()
        if not memory.is_cpu:
            raise ConfigError(f"transport 'nixl' reaches host memory only, not {memory.device}")
        with self._changed:
            assert not self._closed
            self._registered += 1
            name = RegionName(f"kvrelay-{self._incarnation}-{self._registered}")
            self._agent.register(memory)
            self._regions[name] = memory
        return Region(name, memory)

    def deregister(self, region: Region) -> None:
        with self._changed:
            memory = self._regions.pop(region.name, None)
            if memory is None:
                return
            holders = set(self._connections)
            self._retiring[region.name] = memory, set(holders)
            self._free_retired()
        for connection in holders:
            connection.reply(Packet.RETIRE, region.name.encode())

    def connect(self, address: str) -> NixlConnection:
        sock = nixl_wire.dial(address)
        try:
            nixl_wire.introduce(sock, Packet.HELLO, self.address, address)
            nixl_wire.welcomed(sock, address)
            connection = self._adopt(sock, address)
        except (OSError, PeerError):
            sock.close()
            raise
        self._threads.start(f"{self.address} <- {address}", lambda: self._deliver(connection))
        return connection

    def close(self) -> None:
        with self._changed:
            already, self._closed = self._closed, True
            for sock in (*self._greeting, self._listener):
                nixl_wire.shut_down(sock)
            connections = list(self._connections)
        for connection in connections:
            connection.close()
        self._part_from(connections)
        self._threads.join()
        if not already:
            with self._changed:
                self._regions.clear()
                self._retiring.clear()
                self._agent.close()

    def _part_from(self, connections: list[NixlConnection]) -> None:
        """Wait for the peers' ends, but not for that of the thread which closes."""
        here = threading.current_thread()
        others = {c for c in connections if c.thread is not here}
        with self._changed:
            self._changed.wait_for(lambda: not others & self._connections, _FAREWELL_S)
        for connection in connections:
            connection.abandon()

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
        with self._changed:
            if self._closed:
                sock.close()
                return
            nixl_wire.tune(sock)
            sock.settimeout(nixl_wire.HANDSHAKE_TIMEOUT_S)
            self._greeting.add(sock)
            self._threads.start(f"{self.address} serves", lambda: self._serve(sock))

    def _serve(self, sock: socket.socket) -> None:
        """Run by the thread of an accepted socket: its first packet says what it is for."""
        try:
            connection = self._answer(sock)
        except (OSError, PeerError):
            connection = None  # the peer was told why, or is gone
        with self._changed:
            self._greeting.discard(sock)
            if connection is None:
                sock.close()
        if connection is not None:
            self._deliver(connection, accepted=True)

    def _answer(self, sock: socket.socket) -> NixlConnection | None:
        match nixl_wire.receive(sock):
            case Packet.HELLO, payload:
                peer_address = nixl_wire.introduced(sock, payload, self.address)
                return self._welcome(sock, self._adopt(sock, peer_address))
            case Packet.GET, name:
                self._grant(sock, RegionName(name.decode(errors="replace")))
        return None

    def _adopt(self, sock: socket.socket, peer_address: str) -> NixlConnection:
        with self._changed:
            if self._closed:
                raise PeerError(f"{self.address} is closed")
            peer = self._peers.setdefault(peer_address, NixlPeer(self._agent, peer_address))
            peer.users += 1
            connection = NixlConnection(sock, peer, peer_address, self._send_timeout_s)
            self._connections.add(connection)
        return connection

    def _welcome(self, sock: socket.socket, connection: NixlConnection) -> NixlConnection:
        try:
            nixl_wire.introduce(sock, Packet.WELCOME, self.address, connection.peer_address)
        except OSError:
            self._forget(connection)
            raise
        return connection

    def _grant(self, sock: socket.socket, region: RegionName) -> None:
        with self._changed:
            memory = self._regions.get(region)
            given = None if memory is None else self._describe(memory)
        if given is None:
            nixl_wire.send(sock, Packet.REFUSE, b"no such region")
        else:
            nixl_wire.grant(sock, given)

    def _describe(self, memory: torch.Tensor) -> Grant:
        description = self._agent.describe(memory)
        return Grant(address=memory.data_ptr(), nbytes=memory.numel(), description=description)

    def _deliver(self, connection: NixlConnection, *, accepted: bool = False) -> None:
        connection.deliver(
            self._callbacks, lambda name: self._let_go(connection, name), accepted=accepted
        )
        self._forget(connection)

    def _forget(self, connection: NixlConnection) -> None:
        with self._changed:
            self._connections.discard(connection)
            for _, holders in self._retiring.values():
                holders.discard(connection)
            self._free_retired()
            peer = connection.peer
            peer.users -= 1
            if peer.users == 0:
                peer.rest()
            self._changed.notify_all()

    def _let_go(self, connection: NixlConnection, region: RegionName) -> None:
        with self._changed:
            if region in self._retiring:
                self._retiring[region][1].discard(connection)
            self._free_retired()

    def _free_retired(self) -> None:
        for name, (memory, holders) in list(self._retiring.items()):
            if not holders:
                del self._retiring[name]
                self._agent.deregister(memory)
