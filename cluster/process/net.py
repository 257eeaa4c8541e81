"""Addresses: reading HOST:PORT, and finding this machine's own.

Also the gRPC servers of workers and routers: a busy port is an error, and ports come from the
configured range.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

import grpc

from kvrelay.access.tls import add_port
from kvrelay.access.token import TokenCheck
from kvrelay.access.values import Access
from kvrelay.errors import ConfigError


def host_id() -> str:
    """The same for all processes that can reach each other's shared memory: those of one network
    namespace. Pods of one machine differ."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return sha256(f"{boot}{os.readlink('/proc/self/ns/net')}".encode()).hexdigest()[:8]


def host_towards(joins: Sequence[str]) -> str:
    """The address of this machine on the way to each HOST:PORT. Raises ConfigError if there is no
    way, or if the addresses differ."""
    first, *others = joins
    host = _host_towards(first)
    for other in others:
        if (its := _host_towards(other)) != host:
            raise ConfigError(
                f"--join {other}: towards it this machine's address is {its}, but {host} towards "
                f"{first}: set network.host to one that both reach"
            )
    return host


def _host_towards(join: str) -> str:
    host, port = split_address(join, "--join")
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"--join {join}: no way to {host}: {error.strerror}") from None


def split_address(text: str, option: str) -> tuple[str, int]:
    """HOST:PORT. Raises ConfigError, naming the option."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{option} {text}: expected HOST:PORT")
    return host.strip("[]"), int(port)


MESSAGE_BYTES = 64 * 1024 * 1024
PING_MS, PATIENCE_MS = 10_000, 20_000
"""A client that answers no ping for this long is gone or hangs; its calls end."""


REGISTERED_PING_MS, REGISTERED_PATIENCE_MS = 5_000, 10_000
"""A router that answers no ping for this long is gone: its host may have been switched off."""


def registration_options() -> list[tuple[str, int]]:
    """Of a channel on which nothing is said but pings."""
    return [
        ("grpc.keepalive_time_ms", REGISTERED_PING_MS),
        ("grpc.http2.ping_timeout_ms", REGISTERED_PATIENCE_MS),
        ("grpc.http2.max_pings_without_data", 0),  # no limit
    ]


def grpc_server(access: Access) -> grpc.aio.Server:
    """Every call needs the cluster's token. Without so_reuseport, which would let two servers share
    a port unnoticed. Keepalive pings are allowed at any time: a router sends them while a long step
    keeps its worker silent."""
    options = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", PING_MS),
        ("grpc.http2.ping_timeout_ms", PATIENCE_MS),
    ]
    return grpc.aio.server(options=options, interceptors=[TokenCheck(access.token)])


def bind_port(
    server: grpc.aio.Server, host: str, port_range: tuple[int, int] | None, access: Access
) -> int:
    """A port that the system chooses, or the first free one of the range (ends included). Raises
    ConfigError when there is none, or no certificate."""
    ports = [0] if port_range is None else range(port_range[0], port_range[1] + 1)
    for port in ports:
        try:
            return add_port(server, f"{host}:{port}", access.serves)
        except RuntimeError:
            continue
    raise _no_port(host, port_range)


def listening_socket(host: str, port_range: tuple[int, int] | None) -> socket.socket:
    """On a port that the system chooses, or the first free one of the range (ends included)."""
    for port in [0] if port_range is None else range(port_range[0], port_range[1] + 1):
        try:
            return socket.create_server((host, port), family=_family(host))
        except OSError:
            continue
    raise _no_port(host, port_range)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _no_port(host: str, port_range: tuple[int, int] | None) -> ConfigError:
    where = "any port" if port_range is None else f"ports {port_range[0]} to {port_range[1]}"
    return ConfigError(
        f"can't listen on {host}, {where}: check network.host and network.port_range"
    )


def is_loopback(host: str) -> bool:
    """Only this machine reaches it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
