"""Opening a router's port, with an error that says what is wrong with it."""

from __future__ import annotations

import errno
import socket

from kvrelay.errors import ConfigError

BACKLOG = 2048


def listen(kind: str, host: str, port: int) -> socket.socket:
    """`kind` as in the name of its key, such as internal HTTP. Raises ConfigError with the system's
    reason."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only on sockets that say they are TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _refusal(kind, bracketed(host, port), error) from error
    listener.setblocking(False)
    return listener


def bracketed(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _refusal(kind: str, address: str, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        key = f"router.{kind.lower().replace(' ', '_')}_port"
        return ConfigError(
            f"the {kind} port {address} is in use: set {key} to another, or to 0 for any"
        )
    return ConfigError(f"the {kind} port {address}: {error.strerror}")
