"""Requests that wait at the router: those whose worker failed and that no other has taken yet, and
those that admission has deferred. Pure.

Places come free and workers come back, so each asks again for a while. What workers say is the
clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf

from router.refusal import Refusal

PATIENCE_S = 5.0
"""How long an admitted request waits for a place on another worker."""
ASK_AGAIN_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    """`next_s` is infinite while a worker is being asked."""

    refusal: Refusal
    next_s: float
    until_s: float


@dataclass(slots=True)
class WaitingRoom:
    _waits: dict[str, _Wait] = field(default_factory=dict)  # request id |-> wait, first come first

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waits

    def __iter__(self) -> Iterator[str]:
        return iter(self._waits)

    def try_wait(self, request_id: str, refusal: Refusal, patience_s: float, now_s: float) -> bool:
        """False when it has waited long enough."""
        wait = self._waits.get(request_id)
        until_s = now_s + patience_s if wait is None else wait.until_s
        if now_s >= until_s:
            return False
        next_s = now_s + ASK_AGAIN_S
        self._waits[request_id] = _Wait(refusal=refusal, next_s=next_s, until_s=until_s)
        return True

    def take_next(self, now_s: float) -> tuple[str, Refusal] | None:
        """Whose turn it is to ask, and what it was told last. It waits on if refused again."""
        due = (name for name, wait in self._waits.items() if wait.next_s <= now_s)
        if (name := next(due, None)) is None:
            return None
        wait = self._waits[name]
        self._waits[name] = replace(wait, next_s=inf)
        return name, wait.refusal

    def is_due_later(self, request_id: str) -> bool:
        """Whether it was refused again, and will ask again."""
        wait = self._waits.get(request_id)
        return wait is not None and wait.next_s < inf

    def leave(self, request_id: str) -> None:
        self._waits.pop(request_id, None)
