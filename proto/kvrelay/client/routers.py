"""The choice between several routers, and what a channel to one needs.

The client uses the router that answered last until it is gone, then the next untried one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Generic, TypeVar

from kvrelay.errors import KvrelayError, Refused, RequestFailedError

Stub = TypeVar("Stub")

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
)
"""Log probabilities of a long prompt exceed the 4 MiB that gRPC accepts by default. A router that
does not answer for 4 s is gone."""


def addresses_of(given: str | Sequence[str]) -> tuple[str, ...]:
    """Raises ValueError when there is none."""
    addresses = (given,) if isinstance(given, str) else tuple(given)
    if not addresses:
        raise ValueError("expected at least one HOST:PORT")
    return addresses


KEY_VARIABLE = "KVRELAY_API_KEY"


def api_key_of(given: str | None) -> str:
    """Empty: no key is sent."""
    return os.environ.get(KEY_VARIABLE, "") if given is None else given


def with_key(stub: Stub, api_key: str) -> Stub:
    """Its calls bring the key. An empty one is none."""
    if api_key:
        metadata = (("authorization", f"Bearer {api_key}"),)
        for name, call in list(vars(stub).items()):
            setattr(stub, name, partial(call, metadata=metadata))
    return stub


class Routers(Generic[Stub]):
    def __init__(self, stubs: Sequence[Stub]) -> None:
        self.stubs, self.current = tuple(stubs), 0

    def tour(self) -> Tour[Stub]:
        return Tour(self)


class Tour(Generic[Stub]):
    """The routers of one request: each is tried once."""

    def __init__(self, routers: Routers[Stub]) -> None:
        self._routers = routers
        self._at = routers.current
        self._left = len(routers.stubs) - 1

    @property
    def routers(self) -> int:
        return len(self._routers.stubs)

    @property
    def stub(self) -> Stub:
        return self._routers.stubs[self._at]

    def try_next(self, error: KvrelayError) -> bool:
        """True if another router is left to try, and may serve a call that had no result: this one
        is gone, or stops."""
        stops = isinstance(error, Refused) and error.reason == "draining"
        if not (stops or is_gone(error)) or not self._left:
            return False
        self._left -= 1
        self.go_on()
        return True

    def can_go_on(self, *, has_begun: bool) -> bool:
        """Whether a router that stops may end the request: another one is left to ask. A stream
        that has begun may go on at any."""
        return self.routers > 1 if has_begun else self._left > 0

    def go_on(self) -> None:
        """To the next router, also one that was tried before."""
        self._at = (self._at + 1) % len(self._routers.stubs)
        self._routers.current = self._at


def is_gone(error: KvrelayError) -> bool:
    """A router itself never sends this reason."""
    return isinstance(error, RequestFailedError) and error.reason == "unavailable"
