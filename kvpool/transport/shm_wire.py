"""Packets and sockets of the shm transport: AF_UNIX, abstract names, peers of the same user only.

An accepted socket starts with one packet: `HELLO` opens a connection (answered by `WELCOME`, then
`MESSAGE`s both ways), `GET` asks for a region's descriptor (answered by `GRANT` or `REFUSE`, then
closed).
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from enum import IntEnum

from kvpool.transport.base import MAX_MESSAGE_BYTES, RegionName
from kvpool.transport.memfd import Loan, Mapping, Place
from kvrelay.errors import PeerError
from kvrelay.types import WIRE_VERSION, Incarnation

HANDSHAKE_TIMEOUT_S = 5.0
SCHEME = "shm"
_SOCKET_BUFFER_BYTES = 4 * MAX_MESSAGE_BYTES
_VERSION = struct.Struct("<H")
_PLACE = struct.Struct("<QQQI")  # bytes made, offset, bytes, loan
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_TIMEVAL = struct.Struct("ll")  # seconds, microseconds


class Packet(IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    MESSAGE = 4
    GET = 5
    GRANT = 6


def address_of(incarnation: Incarnation) -> str:
    return f"{SCHEME}:{incarnation}"


def new_socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    return sock


def listen(address: str) -> socket.socket:
    sock = new_socket()
    sock.bind(_abstract_name(address))
    sock.listen()
    return sock


def dial(address: str) -> socket.socket:
    """A connected socket, with HANDSHAKE_TIMEOUT_S; PeerError when no one is there."""
    sock = new_socket()
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    try:
        sock.connect(_abstract_name(address))
    except OSError as error:
        sock.close()
        raise PeerError(
            f"no one listens at {address} on this host ({error.strerror or error}); "
            "has that worker stopped?"
        ) from error
    if not same_user(sock):
        sock.close()
        raise PeerError(f"{address} belongs to another user")
    return sock


def same_user(sock: socket.socket) -> bool:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def set_send_timeout(sock: socket.socket, timeout_s: float) -> None:
    """Reads block for ever, a send no longer than this (then BlockingIOError)."""
    sock.settimeout(None)
    seconds = int(timeout_s)
    value = _TIMEVAL.pack(seconds, int((timeout_s - seconds) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def send(sock: socket.socket, packet: Packet, payload: bytes = b"") -> None:
    sock.sendmsg([bytes([packet]), payload])


def receive(sock: socket.socket) -> tuple[Packet, bytes] | None:
    """The next packet; None when the peer is gone. Raises PeerError for what is no packet."""
    while True:
        try:
            data = sock.recv(1 + MAX_MESSAGE_BYTES)
        except ConnectionResetError:
            continue  # the peer left unread what we sent; what it sent us before is still to come
        return (_packet(data[0]), data[1:]) if data else None


def _packet(kind: int) -> Packet:
    try:
        return Packet(kind)
    except ValueError as error:
        raise PeerError(f"the peer sent an unknown packet ({kind})") from error


def introduce(sock: socket.socket, packet: Packet, address: str) -> None:
    send(sock, packet, _VERSION.pack(WIRE_VERSION) + address.encode())


def introduced(sock: socket.socket, payload: bytes) -> str:
    """The address in a HELLO. Tells the peer, and raises PeerError, when its version differs."""
    try:
        return _introduction(payload)
    except PeerError as error:
        send(sock, Packet.REFUSE, str(error).encode())
        raise


def welcomed(sock: socket.socket, address: str) -> str:
    """The peer's own address, once it has answered our HELLO. Raises PeerError."""
    try:
        answer = receive(sock)
    except OSError as error:
        raise PeerError(f"{address} did not answer: {error}") from error
    if answer is None or answer[0] is not Packet.WELCOME:
        reason = answer[1].decode() if answer else "it closed the connection"
        raise PeerError(f"{address} refused: {reason}")
    return _introduction(answer[1])


def _introduction(payload: bytes) -> str:
    version = int.from_bytes(payload[: _VERSION.size], "little")
    if version != WIRE_VERSION:
        raise PeerError(f"the peer speaks wire version {version}, this one {WIRE_VERSION}")
    return payload[_VERSION.size :].decode()


def shut_down(sock: socket.socket) -> None:
    """Wakes whoever reads or writes it, on both sides."""
    with suppress(OSError):  # the peer or another thread was faster
        sock.shutdown(socket.SHUT_RDWR)


def grant(sock: socket.socket, loan: Loan) -> None:
    at = loan.place
    place = _PLACE.pack(at.made_bytes, at.offset, at.nbytes, at.loan)
    socket.send_fds(sock, [bytes([Packet.GRANT]), place], [loan.fd])


def fetch(address: str, region: RegionName) -> Mapping:
    """Ask the endpoint at `address` for its region and map it. Raises PeerError."""
    with dial(address) as sock:
        try:
            send(sock, Packet.GET, region.encode())
            data, fds, _, _ = socket.recv_fds(sock, 1024, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise PeerError(f"{address} did not answer for region {region}: {error}") from error
    try:
        if not data or data[0] != Packet.GRANT or len(fds) != 1:
            raise PeerError(f"{address} has no region {region} (any more)")
        return Mapping(fds[0], _placed(data[1:]))
    finally:
        for fd in fds:
            os.close(fd)


def _placed(payload: bytes) -> Place:
    if len(payload) != _PLACE.size:
        raise PeerError(f"the peer granted a region in {len(payload)} bytes")
    made_bytes, offset, nbytes, loan = _PLACE.unpack(payload)
    return Place(made_bytes=made_bytes, offset=offset, nbytes=nbytes, loan=loan)


def _abstract_name(address: str) -> bytes:
    scheme, _, rest = address.partition(":")
    if scheme != SCHEME or not rest:
        raise PeerError(f"{address!r} is not an address of the shm transport (shm:INCARNATION)")
    return b"\0kvrelay-" + rest.encode()
