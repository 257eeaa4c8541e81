"""A prompt that waits to be computed, as its order sees it. Pure."""

from __future__ import annotations

from typing import Protocol, TypeVar

from kvrelay.types import RequestKey


class Prompt(Protocol):
    """It came `arrival`-th. Its first token is due at `deadline_s`, and alone it would take
    `left_s` more; both are the order's to set."""

    arrival: int
    deadline_s: float | None
    left_s: float

    @property
    def key(self) -> RequestKey: ...

    @property
    def tenant(self) -> str: ...

    @property
    def qos_tier(self) -> str: ...

    @property
    def within_s(self) -> float | None:
        """How soon after it came its first token is due."""

    @property
    def computed(self) -> int:
        """Tokens whose KV is there."""

    @property
    def remaining(self) -> int:
        """Tokens to be computed."""


P = TypeVar("P", bound=Prompt)
