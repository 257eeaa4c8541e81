"""Where endpoints listen, how peers find them, and which peers are admitted.

On one host: abstract UNIX sockets, for processes of the same user. Between hosts: TCP, for
processes that prove they know the cluster's secret, its token. Both sides prove it, and neither
tells it; later data are not encrypted.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
from typing import Protocol

from kvpool.transport.peer import control_wire
from kvpool.transport.peer.base import MAX_MESSAGE_BYTES
from kvpool.transport.peer.control_wire import HANDSHAKE_TIMEOUT_S, Packet
from kvrelay.errors import ConfigError, PeerError

_MOST_BYTES = 1024
"""Of a packet from somebody who has proved nothing yet."""
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_NONCE_BYTES = 32
_SILENCE_S = 4
"""A path is gone when the peer's kernel has confirmed nothing for so long. That of a stopped
process confirms."""
ON_DEVICE = "gpu"
"""Stands before the name in the address of an end of nixl or ucx whose slabs lie on a GPU."""
_SEND_BUFFER_BYTES = 4 * MAX_MESSAGE_BYTES  # all that a connection has unread at a time


class Rendezvous(Protocol):
    @property
    def address(self) -> str:
        """The address for `dial`."""

    @property
    def listener(self) -> socket.socket: ...

    def dial(self, address: str) -> socket.socket:
        """A connected and admitted socket, with HANDSHAKE_TIMEOUT_S. Raises PeerError, with the
        address, when nobody listens there or admits us."""

    def admit(self, sock: socket.socket) -> None:
        """Raises PeerError, and tells the accepted peer, when it may not connect."""


class SameHost:
    """`SCHEME:NAME`. No file system has a name of it, so nothing is left behind."""

    def __init__(self, scheme: str, name: str) -> None:
        """Raises ConfigError when another process of this host listens there."""
        self._scheme = scheme
        self.address = f"{scheme}:{name}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.listener.bind(self._abstract_name(self.address))
        except OSError as error:
            self.listener.close()
            raise ConfigError(f"can't listen at {self.address}: {error.strerror}") from error
        self.listener.listen()

    def dial(self, address: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        try:
            sock.connect(self._abstract_name(address))
            self.admit(sock)
        except OSError as error:
            sock.close()
            raise _nobody(address, error, " on this host") from error
        except PeerError:
            sock.close()
            raise
        return sock

    def admit(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        user = _CREDENTIALS.unpack(credentials)[1]
        if user != os.geteuid():
            raise PeerError(f"the peer belongs to another user ({user})")

    def _abstract_name(self, address: str) -> bytes:
        scheme, _, rest = address.partition(":")
        if scheme != self._scheme or not rest:
            expected = f"{self._scheme}:INCARNATION"
            raise PeerError(f"{address!r} is no address of this transport ({expected})")
        return f"\0kvrelay-{address}".encode()


class Network:
    """`SCHEME:HOST:PORT/NAME`."""

    def __init__(
        self,
        scheme: str,
        name: str,
        *,
        host: str,
        port_range: tuple[int, int] | None,
        secret: bytes,
    ) -> None:
        """Listens on `host`, which is sent to peers. Without a secret it lets nobody in. Raises
        ConfigError when no port is free."""
        self._scheme = scheme
        self._secret = secret or secrets.token_bytes(_NONCE_BYTES)
        self.listener = _listen(host, port_range)
        self.address = f"{scheme}:{host}:{self.listener.getsockname()[1]}/{name}"

    def dial(self, address: str) -> socket.socket:
        try:
            sock = socket.create_connection(self._host_and_port(address), HANDSHAKE_TIMEOUT_S)
        except OSError as error:
            raise _nobody(address, error) from error
        try:
            _tune(sock)
            self._prove(sock, address)
        except OSError as error:
            sock.close()
            raise PeerError(f"{address} did not answer: {error}") from error
        except PeerError:
            sock.close()
            raise
        return sock

    def admit(self, sock: socket.socket) -> None:
        _tune(sock)
        ours = secrets.token_bytes(_NONCE_BYTES)
        control_wire.send(sock, Packet.CHALLENGE, ours)
        proof = control_wire.answer(sock, "the peer", Packet.PROOF, _MOST_BYTES)
        theirs, digest = proof[:_NONCE_BYTES], proof[_NONCE_BYTES:]
        if not hmac.compare_digest(digest, self._digest(b"connects", ours, theirs)):
            reason = "its cluster has another token"
            control_wire.send(sock, Packet.REFUSE, reason.encode())
            raise PeerError("the peer has another cluster's token")
        control_wire.send(sock, Packet.PROOF, self._digest(b"accepts", ours, theirs))

    def _prove(self, sock: socket.socket, address: str) -> None:
        theirs = control_wire.answer(sock, address, Packet.CHALLENGE, _MOST_BYTES)
        ours = secrets.token_bytes(_NONCE_BYTES)
        control_wire.send(sock, Packet.PROOF, ours + self._digest(b"connects", theirs, ours))
        digest = control_wire.answer(sock, address, Packet.PROOF, _MOST_BYTES)
        if not hmac.compare_digest(digest, self._digest(b"accepts", theirs, ours)):
            raise PeerError(f"{address} does not know this cluster's token")

    def _digest(self, side: bytes, challenge: bytes, answer: bytes) -> bytes:
        return hmac.digest(self._secret, side + challenge + answer, "sha256")

    def _host_and_port(self, address: str) -> tuple[str, int]:
        scheme, _, rest = address.partition(":")
        host, _, port = rest.partition("/")[0].rpartition(":")
        if scheme != self._scheme or not host or not port.isdecimal():
            expected = f"{self._scheme}:HOST:PORT/NAME"
            raise PeerError(f"{address!r} is no address of this transport ({expected})")
        return host, int(port)


def _listen(host: str, port_range: tuple[int, int] | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    first, last = port_range or (0, 0)
    for port in range(first, last + 1):
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            reason = error
    where = f"ports {first} to {last}" if port_range else "any port"
    raise ConfigError(
        f"can't listen on {host}, {where} ({reason}): check network.host and network.port_range"
    ) from reason


def _tune(sock: socket.socket) -> None:
    """Small packets are sent at once, and a vanished host or path is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE_S // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_S)


def _nobody(address: str, error: OSError, where: str = "") -> PeerError:
    reason = error.strerror or error
    return PeerError(f"no one listens at {address}{where} ({reason}); has that worker stopped?")
