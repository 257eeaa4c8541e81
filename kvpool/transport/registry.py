"""Transports by scheme. A transport joins with one line in `_OPENERS`."""

from __future__ import annotations

from collections.abc import Callable

from kvpool.transport.base import SEND_TIMEOUT_S, Callbacks, Endpoint
from kvpool.transport.loopback import LoopbackEndpoint
from kvpool.transport.nixl import NixlEndpoint
from kvpool.transport.shm import ShmEndpoint
from kvrelay.errors import ConfigError
from kvrelay.types import Incarnation

LOOPBACK_HOST = "127.0.0.1"

_OPENERS: dict[str, Callable[[Incarnation, Callbacks, float, str], Endpoint]] = {
    "loopback": lambda own, callbacks, timeout_s, _: LoopbackEndpoint(own, callbacks, timeout_s),
    "shm": lambda own, callbacks, timeout_s, _: ShmEndpoint(own, callbacks, timeout_s),
    "nixl": NixlEndpoint,
}


def schemes() -> tuple[str, ...]:
    return tuple(_OPENERS)


def open_endpoint(
    scheme: str,
    incarnation: Incarnation,
    callbacks: Callbacks,
    *,
    send_timeout_s: float = SEND_TIMEOUT_S,
    host: str = LOOPBACK_HOST,
) -> Endpoint:
    """`host` is where links between hosts listen, and what peers are told. Raises ConfigError for
    a scheme that does not exist, naming those that do, or whose package is not installed."""
    opener = _OPENERS.get(scheme)
    if opener is None:
        raise ConfigError(f"no transport {scheme!r}; there are: {', '.join(schemes())}")
    return opener(incarnation, callbacks, send_timeout_s, host)
