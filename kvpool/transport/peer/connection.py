"""One peer of a transport with a control connection: a thread that reads its packets.

While the peer has too much unread, messages wait here, not in the socket. So a refused message has
not been sent in part.

Memory of a peer that the endpoint can reach is shared by all connections to that peer.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from kvpool.transport.peer import control_wire
from kvpool.transport.peer.base import MAX_MESSAGE_BYTES, Callbacks, Read, RegionName, RegionWrite
from kvpool.transport.peer.control_wire import Packet
from kvpool.transport.peer.exposure import PeerMemory
from kvrelay.errors import PeerError

_UNREAD_BYTES = 4 * MAX_MESSAGE_BYTES
_REPORT_BYTES = _UNREAD_BYTES // 8
_MESSAGE_OVERHEAD_BYTES = 1024  # at least a socket buffer's overhead for a small message


class PeerConnection:
    def __init__(
        self, sock: socket.socket, peer: PeerMemory, peer_address: str, send_timeout_s: float
    ) -> None:
        self._socket = sock
        self._peer = peer
        self._peer_address = peer_address
        self._send_timeout_s = send_timeout_s
        self._send_lock = threading.Lock()
        self._changed = threading.Condition()
        self._unread_bytes = 0  # sent, and not yet given to the peer's callback
        self._taken_bytes = 0  # given to our callback, and not yet reported
        self.is_open = False
        self._closed = False
        self._over = False
        self.thread: threading.Thread | None = None  # the one that delivers

    @property
    def peer_address(self) -> str:
        return self._peer_address

    def open(self) -> None:
        """Takes the socket over, once both sides have introduced themselves. Raises OSError."""
        control_wire.set_send_timeout(self._socket, self._send_timeout_s)
        self.is_open = True

    def write(self, region: RegionName, offset: int, source: torch.Tensor) -> None:
        self.write_many([RegionWrite(region, offset, source)])

    def read(self, region: RegionName, offset: int, target: torch.Tensor) -> None:
        self.read_many([Read(region, offset, target)])

    def write_many(self, writes: Sequence[RegionWrite]) -> None:
        self._peer.write(writes, self._check)

    def read_many(self, reads: Sequence[Read]) -> None:
        self._peer.read(reads, self._check)

    def window(self, region: RegionName) -> torch.Tensor | None:
        return self._peer.window(region, self._check)

    def notify(self, payload: bytes) -> None:
        assert len(payload) <= MAX_MESSAGE_BYTES, len(payload)
        size = len(payload) + _MESSAGE_OVERHEAD_BYTES
        with self._changed:
            room = self._changed.wait_for(lambda: self._has_room(size), self._send_timeout_s)
            self._check()
            if not room:
                reason = f"{self._peer_address} has read nothing for {self._send_timeout_s} s"
                raise PeerError(reason)
            self._unread_bytes += size
        self.send(Packet.MESSAGE, payload)

    def send(self, packet: Packet, payload: bytes = b"") -> None:
        """Raises PeerError; then the connection is over, because the packet may be sent in part."""
        with self._send_lock:
            try:
                control_wire.send(self._socket, packet, payload)
            except OSError as error:
                control_wire.shut_down(self._socket)
                raise PeerError(f"{self._peer_address} is gone: {error}") from error

    def close(self) -> None:
        """The peer answers with its own end, once it writes nothing here any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._peer.drain()
        control_wire.shut_down(self._socket, socket.SHUT_WR)

    def abandon(self) -> None:
        """Closed, and the peer has not answered."""
        control_wire.shut_down(self._socket)

    def deliver(
        self, callbacks: Callbacks, retired: Callable[[RegionName], None], *, accepted: bool
    ) -> None:
        """Runs on this connection's thread until either side closes or dies."""
        self.thread = threading.current_thread()
        if accepted:
            callbacks.on_connect(self)
        try:
            while (received := control_wire.receive(self._socket)) is not None:
                self._take(callbacks, retired, *received)
        except (OSError, PeerError):
            pass  # the peer died, or breaks the protocol
        self._end()
        if not self._closed:
            callbacks.on_lost(self)

    def _take(
        self,
        callbacks: Callbacks,
        retired: Callable[[RegionName], None],
        packet: Packet,
        payload: bytes,
    ) -> None:
        match packet:
            case Packet.MESSAGE:
                self._take_message(callbacks, payload)
            case Packet.READ:
                self._make_room(control_wire.counted(payload))
            case Packet.RETIRE:
                self._peer.retire(RegionName(payload.decode(errors="replace")))
                self.reply(Packet.RETIRED, payload)
            case Packet.RETIRED:
                retired(RegionName(payload.decode(errors="replace")))
            case _:
                raise PeerError(f"the peer sent {packet.name} in a connection")

    def _take_message(self, callbacks: Callbacks, payload: bytes) -> None:
        if self._closed:
            return
        callbacks.on_message(self, payload)
        self._taken_bytes += len(payload) + _MESSAGE_OVERHEAD_BYTES
        if self._taken_bytes >= _REPORT_BYTES:
            taken, self._taken_bytes = self._taken_bytes, 0
            self.reply(Packet.READ, control_wire.count(taken))

    def reply(self, packet: Packet, payload: bytes) -> None:
        if not self._closed:
            with suppress(PeerError):  # messages sent before its death are still to come
                self.send(packet, payload)

    def _make_room(self, nbytes: int) -> None:
        with self._changed:
            self._unread_bytes -= nbytes
            self._changed.notify_all()

    def _has_room(self, nbytes: int) -> bool:
        return self._gone() or self._unread_bytes + nbytes <= _UNREAD_BYTES

    def _gone(self) -> bool:
        return self._closed or self._over

    def _check(self) -> None:
        if self._gone():
            raise PeerError(f"{self._peer_address} is gone")

    def _end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._peer.drain()
        control_wire.shut_down(self._socket)
        with self._send_lock:
            self._socket.close()


@dataclass(slots=True)
class _Peer:
    memory: PeerMemory
    users: int = 0  # connections
    met: int = 0  # how many there have been


class KnownPeers:
    """# address |-> its memory, made by `reach` when the first connection uses it. Thread safe."""

    def __init__(self, reach: Callable[[str], PeerMemory]) -> None:
        self._reach = reach
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}

    def __getitem__(self, address: str) -> PeerMemory:
        """The memory of a peer in use."""
        return self._peers[address].memory

    def use(self, address: str) -> PeerMemory:
        """Counts one more connection, until it leaves."""
        with self._lock:
            peer = self._peers.get(address)
            if peer is None:
                peer = self._peers[address] = _Peer(self._reach(address))
            peer.users += 1
            peer.met += 1
            return peer.memory

    def leave(self, address: str) -> None:
        """Peers without a connection rest. Where a copy still runs, that waits until another one
        leaves, or the peer comes back."""
        with self._lock:
            self._peers[address].users -= 1
            resting = [(a, peer, peer.met) for a, peer in self._peers.items() if not peer.users]
        for other, peer, met in resting:
            try:
                forgettable = peer.memory.rest(0.0)
            except PeerError:
                continue
            with self._lock:
                if forgettable and peer.met == met and self._peers.get(other) is peer:
                    del self._peers[other]
