"""Addresses: reading HOST:PORT, and finding this machine's own."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from kvrelay.errors import ConfigError


def host_id() -> str:
    """The same for all processes of this host that reach each other's shared memory, that is those
    of one network namespace: pods of one machine differ."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return sha256(f"{boot}{os.readlink('/proc/self/ns/net')}".encode()).hexdigest()[:8]


def host_towards(joins: Sequence[str]) -> str:
    """This machine's address on the way to each HOST:PORT. Raises ConfigError if there is none, or
    not the same."""
    first, *others = joins
    host = _host_towards(first)
    for other in others:
        if (its := _host_towards(other)) != host:
            raise ConfigError(
                f"--join {other}: this machine is {its} on the way there, but {host} on the way to "
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
