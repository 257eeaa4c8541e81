"""Admitted requests whose worker failed and that no other has taken yet. Pure.

Places come free and workers come back, so each asks again for a while. What workers say is the
clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf

from router.admission import Refusal

PATIENCE_S = 5.0
"""How long a request waits for a place on another worker."""
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

    def try_wait(self, request_id: str, refusal: Refusal, now_s: float) -> bool:
        """False when it has waited long enough."""
        wait = self._waits.get(request_id)
        until_s = now_s + PATIENCE_S if wait is None else wait.until_s
        if now_s >= until_s:
            return False
        next_s = now_s + ASK_AGAIN_S
        self._waits[request_id] = _Wait(refusal=refusal, next_s=next_s, until_s=until_s)
        return True

    def take_due(self, now_s: float) -> list[tuple[str, Refusal]]:
        """Whose turn it is to ask, and what they were told last. They wait on if refused again."""
        due = [(name, wait) for name, wait in self._waits.items() if wait.next_s <= now_s]
        self._waits |= {name: replace(wait, next_s=inf) for name, wait in due}
        return [(name, wait.refusal) for name, wait in due]

    def leave(self, request_id: str) -> None:
        self._waits.pop(request_id, None)
