"""The control connection of the nixl transport: packets over TCP, between any two hosts.

An accepted socket starts with one packet: `HELLO` opens a connection (answered by `WELCOME` or
`REFUSE`, then the packets from `MESSAGE` to `RETIRED` both ways), `GET` asks where a region is
(answered by `GRANT` or `REFUSE`, then closed).
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from kvpool.transport.base import MAX_MESSAGE_BYTES, RegionName
from kvrelay.errors import PeerError
from kvrelay.types import WIRE_VERSION, Incarnation

HANDSHAKE_TIMEOUT_S = 5.0
SCHEME = "nixl"
_FRAME = struct.Struct("<BI")  # packet, bytes of its payload
_VERSION = struct.Struct("<H")
_PLACE = struct.Struct("<QQ")  # address, bytes
_COUNT = struct.Struct("<I")
_TIMEVAL = struct.Struct("ll")  # seconds, microseconds
_SILENCE_S = 20


class Packet(IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    MESSAGE = 4
    READ = 5  # so many bytes of messages were taken
    RETIRE = 6  # this region is to be written to no more
    RETIRED = 7  # and it is not
    GET = 8
    GRANT = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    address: int
    nbytes: int
    description: bytes  # for Agent.add_peer

    def overlaps(self, other: Grant) -> bool:
        return (
            self.address < other.address + other.nbytes
            and other.address < self.address + self.nbytes
        )


def listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)


def address_of(listener: socket.socket, host: str, incarnation: Incarnation) -> str:
    return f"{SCHEME}:{host}:{listener.getsockname()[1]}/{incarnation}"


def dial(address: str) -> socket.socket:
    """A connected socket, with HANDSHAKE_TIMEOUT_S; PeerError when no one is there."""
    try:
        sock = socket.create_connection(_host_and_port(address), HANDSHAKE_TIMEOUT_S)
    except OSError as error:
        raise PeerError(
            f"no one listens at {address} ({error.strerror or error}); has that worker stopped?"
        ) from error
    tune(sock)
    return sock


def tune(sock: socket.socket) -> None:
    """Small packets leave at once; a host that has vanished is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE_S // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_S)


def set_send_timeout(sock: socket.socket, timeout_s: float) -> None:
    """Reads block for ever, a send no longer than this (then BlockingIOError)."""
    sock.settimeout(None)
    seconds = int(timeout_s)
    value = _TIMEVAL.pack(seconds, int((timeout_s - seconds) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def send(sock: socket.socket, packet: Packet, payload: bytes = b"") -> None:
    sock.sendall(_FRAME.pack(packet, len(payload)) + payload)


def receive(sock: socket.socket) -> tuple[Packet, bytes] | None:
    """The next packet; None when the peer is gone. Raises PeerError for what is no packet."""
    header = _exactly(sock, _FRAME.size)
    if header is None:
        return None
    kind, size = _FRAME.unpack(header)
    if size > MAX_MESSAGE_BYTES:
        raise PeerError(f"the peer sent a packet of {size} bytes")
    payload = _exactly(sock, size)
    return None if payload is None else (_packet(kind), payload)


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _packet(kind: int) -> Packet:
    try:
        return Packet(kind)
    except ValueError as error:
        raise PeerError(f"the peer sent an unknown packet ({kind})") from error


def introduce(sock: socket.socket, packet: Packet, own: str, peer: str) -> None:
    send(sock, packet, _VERSION.pack(WIRE_VERSION) + f"{own}\n{peer}".encode())


def introduced(sock: socket.socket, payload: bytes, own: str) -> str:
    """The peer's address in a HELLO. Tells the peer, and raises PeerError, when its version
    differs or when it looks for someone else."""
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
    answer = _answer(sock, address)
    if answer is None or answer[0] is not Packet.WELCOME:
        reason = answer[1].decode(errors="replace") if answer else "it closed the connection"
        raise PeerError(f"{address} refused: {reason}")
    _introduction(answer[1])


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


def grant(sock: socket.socket, given: Grant) -> None:
    send(sock, Packet.GRANT, _PLACE.pack(given.address, given.nbytes) + given.description)


def fetch(address: str, region: RegionName) -> Grant:
    """Ask the endpoint at `address` where its region is. Raises PeerError."""
    with dial(address) as sock:
        send(sock, Packet.GET, region.encode())
        answer = _answer(sock, address)
    if answer is None or answer[0] is not Packet.GRANT or len(answer[1]) < _PLACE.size:
        raise PeerError(f"{address} has no region {region} (any more)")
    place, nbytes = _PLACE.unpack_from(answer[1])
    return Grant(address=place, nbytes=nbytes, description=answer[1][_PLACE.size :])


def _answer(sock: socket.socket, address: str) -> tuple[Packet, bytes] | None:
    try:
        return receive(sock)
    except OSError as error:
        raise PeerError(f"{address} did not answer: {error}") from error


def shut_down(sock: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Wakes whoever reads or writes it, on both sides."""
    with suppress(OSError):  # the peer or another thread was faster
        sock.shutdown(how)


def _host_and_port(address: str) -> tuple[str, int]:
    place = address.removeprefix(f"{SCHEME}:").partition("/")[0]
    host, _, port = place.rpartition(":")
    if not address.startswith(f"{SCHEME}:") or not host or not port.isdecimal():
        raise PeerError(f"{address!r} is no address of this transport ({SCHEME}:HOST:PORT/NAME)")
    return host, int(port)
