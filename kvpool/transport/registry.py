"""Transports by scheme. A transport joins with one line in `_OPENERS`."""

from __future__ import annotations

from collections.abc import Callable

from kvpool.transport.base import SEND_TIMEOUT_S, Callbacks, Endpoint
from kvpool.transport.loopback import LoopbackEndpoint
from kvpool.transport.shm import ShmEndpoint
from kvrelay.errors import ConfigError
from kvrelay.types import Incarnation

_OPENERS: dict[str, Callable[[Incarnation, Callbacks, float], Endpoint]] = {
    "loopback": LoopbackEndpoint,
    "shm": ShmEndpoint,
}


def schemes() -> tuple[str, ...]:
    return tuple(_OPENERS)


def open_endpoint(
    scheme: str,
    incarnation: Incarnation,
    callbacks: Callbacks,
    *,
    send_timeout_s: float = SEND_TIMEOUT_S,
) -> Endpoint:
    """Raises ConfigError for a scheme that does not exist, naming those that do."""
    opener = _OPENERS.get(scheme)
    if opener is None:
        raise ConfigError(f"no transport {scheme!r}; there are: {', '.join(schemes())}")
    return opener(incarnation, callbacks, send_timeout_s)


def scheme_of(address: str) -> str:
    """`shm:1f3c` is of the scheme `shm`. Raises ConfigError when the address has none."""
    scheme, colon, _ = address.partition(":")
    if not colon:
        raise ConfigError(f"transport address {address!r} must look like SCHEME:REST")
    return scheme
