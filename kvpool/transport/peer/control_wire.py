"""Packets of a control connection, over TCP or between processes of one host.

An accepted socket is admitted first (`rendezvous`). Then its first packet says its purpose. `HELLO`
opens a connection: the answer is `WELCOME` or `REFUSE`, then packets from `MESSAGE` to `RETIRED` go
both ways. `GET` asks where a region is: the answer is `GRANT` or `REFUSE`, then the socket is
closed.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from kvpool.transport.peer.base import MAX_MESSAGE_BYTES
from kvrelay.errors import PeerError
from kvrelay.types import WIRE_VERSION

HANDSHAKE_TIMEOUT_S = 5.0
_FRAME = struct.Struct("<BI")  # packet, bytes of its payload
_VERSION = struct.Struct("<H")
_COUNT = struct.Struct("<I")
_TIMEVAL = struct.Struct("ll")  # seconds, microseconds


class Packet(IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    MESSAGE = 4
    READ = 5  # this many bytes of messages were read
    RETIRE = 6  # this region is to be used no more
    RETIRED = 7  # and it is not
    GET = 8
    GRANT = 9
    CHALLENGE = 10
    PROOF = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The data by which a peer reaches a region; each transport packs its own payload."""

    payload: bytes
    fd: int | None = None  # passed along, between processes of one host


def set_send_timeout(sock: socket.socket, timeout_s: float) -> None:
    """Reads block for ever, a send at most this long (then BlockingIOError)."""
    sock.settimeout(None)
    seconds = int(timeout_s)
    value = _TIMEVAL.pack(seconds, int((timeout_s - seconds) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def send(sock: socket.socket, packet: Packet, payload: bytes = b"") -> None:
    sock.sendall(_FRAME.pack(packet, len(payload)) + payload)


def receive(
    sock: socket.socket, most_bytes: int = MAX_MESSAGE_BYTES, until_s: float | None = None
) -> tuple[Packet, bytes] | None:
    """The next packet; None when the peer is gone. It must have come by `until_s`, of the monotonic
    clock. Raises PeerError for bytes that are no packet, TimeoutError."""
    header = _exactly(sock, _FRAME.size, until_s)
    if header is None:
        return None
    packet, size = _header(header)
    if size > most_bytes:
        raise PeerError(f"the peer sent a packet of {size} bytes, over {most_bytes}")
    payload = _exactly(sock, size, until_s)
    return None if payload is None else (packet, payload)


def _exactly(sock: socket.socket, size: int, until_s: float | None = None) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        if until_s is not None:
            sock.settimeout(max(0.001, until_s - time.monotonic()))
        try:
            piece = sock.recv(size - len(data))
        except ConnectionResetError:
            continue  # it did not read our packet; its own packets are still to come
        if not piece:
            return None
        data += piece
    return bytes(data)


def _header(header: bytes) -> tuple[Packet, int]:
    kind, size = _FRAME.unpack(header)
    if size > MAX_MESSAGE_BYTES:
        raise PeerError(f"the peer sent a packet of {size} bytes")
    try:
        return Packet(kind), size
    except ValueError as error:
        raise PeerError(f"the peer sent an unknown packet ({kind})") from error


def introduce(sock: socket.socket, packet: Packet, own: str, peer: str) -> None:
    send(sock, packet, _VERSION.pack(WIRE_VERSION) + f"{own}\n{peer}".encode())


def introduced(sock: socket.socket, payload: bytes, own: str) -> str:
    """The peer's address in a HELLO. Tells the peer, and raises PeerError, when its version differs
    or it looks for another process."""
    try:
        theirs, wanted = _introduction(payload)
        if wanted != own:
            raise PeerError(f"{wanted} is gone; {own} is in its place")
    except PeerError as error:
        send(sock, Packet.REFUSE, str(error).encode())
        raise
    return theirs


def welcomed(sock: socket.socket, address: str) -> None:
    """Returns once the peer has answered our HELLO. Raises PeerError."""
    _introduction(answer(sock, address, Packet.WELCOME))


def answer(
    sock: socket.socket, address: str, expected: Packet, most_bytes: int = MAX_MESSAGE_BYTES
) -> bytes:
    """The payload of the peer's next packet, which must come whole within HANDSHAKE_TIMEOUT_S.
    Raises PeerError when it is another one, or longer."""
    try:
        received = receive(sock, most_bytes, time.monotonic() + HANDSHAKE_TIMEOUT_S)
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
    except OSError as error:
        raise PeerError(f"{address} did not answer: {error}") from error
    if received is None or received[0] is not expected:
        reason = received[1].decode(errors="replace") if received else "it closed the connection"
        raise PeerError(f"{address} refused: {reason}")
    return received[1]


def _introduction(payload: bytes) -> tuple[str, str]:
    version = int.from_bytes(payload[: _VERSION.size], "little")
    if version != WIRE_VERSION:
        raise PeerError(f"the peer speaks wire version {version}, this one {WIRE_VERSION}")
    own, _, peer = payload[_VERSION.size :].decode(errors="replace").partition("\n")
    return own, peer


def count(nbytes: int) -> bytes:
    return _COUNT.pack(nbytes)


def counted(payload: bytes) -> int:
    if len(payload) != _COUNT.size:
        raise PeerError(f"the peer sent a count of {len(payload)} bytes")
    return int.from_bytes(payload, "little")


def send_grant(sock: socket.socket, grant: Grant) -> None:
    header = _FRAME.pack(Packet.GRANT, len(grant.payload))
    if grant.fd is None:
        sock.sendall(header)
    else:
        socket.send_fds(sock, [header], [grant.fd])
    sock.sendall(grant.payload)


def receive_grant(sock: socket.socket) -> Grant | None:
    """None when refused, or when the peer is gone. The caller closes the descriptor."""
    header, fds, _, _ = socket.recv_fds(sock, _FRAME.size, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        rest = _exactly(sock, _FRAME.size - len(header)) if header else None
        packet, size = (Packet.REFUSE, 0) if rest is None else _header(header + rest)
        payload = _exactly(sock, size) if packet is Packet.GRANT else None
    except BaseException:
        _close_all(fds)
        raise
    if payload is None:
        _close_all(fds)
        return None
    return Grant(payload=payload, fd=fds[0] if fds else None)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def shut_down(sock: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Wakes readers and writers on both sides."""
    with suppress(OSError):  # the peer or another thread was faster
        sock.shutdown(how)
