"""Which of several routers a client talks to. Pure.

The one that answered last, until it is gone; then the next one that has not been tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from kvrelay.errors import KvrelayError, RequestFailedError

Stub = TypeVar("Stub")

CHANNEL_OPTIONS = (("grpc.max_receive_message_length", -1),)
"""Log probabilities of a long prompt are more than the 4 MiB that gRPC takes by itself."""


def addresses_of(given: str | Sequence[str]) -> tuple[str, ...]:
    """Raises ValueError when there is none."""
    addresses = (given,) if isinstance(given, str) else tuple(given)
    if not addresses:
        raise ValueError("expected at least one HOST:PORT")
    return addresses


class Routers(Generic[Stub]):
    """In the order that they were given."""

    def __init__(self, stubs: Sequence[Stub]) -> None:
        self.stubs = tuple(stubs)
        self.current = 0

    def tour(self) -> Tour[Stub]:
        return Tour(self)


class Tour(Generic[Stub]):
    """Of one request: it tries each router once."""

    def __init__(self, routers: Routers[Stub]) -> None:
        self._routers = routers
        self._at = routers.current
        self._left = len(routers.stubs) - 1

    @property
    def stub(self) -> Stub:
        return self._routers.stubs[self._at]

    def try_next(self, error: KvrelayError) -> bool:
        """Whether the router is gone, as the error of a call that has delivered nothing says, and
        there is another one to try."""
        if not is_gone(error) or not self._left:
            return False
        self._left -= 1
        self._at = (self._at + 1) % len(self._routers.stubs)
        self._routers.current = self._at
        return True


def is_gone(error: KvrelayError) -> bool:
    """No router says so itself."""
    return isinstance(error, RequestFailedError) and error.reason == "unavailable"
