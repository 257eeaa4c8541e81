"""Requests that wait at the router. Pure.

Their worker failed and no other has taken them yet, or admission has deferred them. The first of
each line is tried again as soon as a slot is free or a worker joins. Otherwise it is tried from
time to time, since memory and pace may suffice by then; reports of workers are the clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf

from router.core.state.promises import Refusal

PATIENCE_S = 5.0
"""How long an admitted request waits for a place on another worker."""
ASK_AGAIN_S = 0.25
"""While no slot is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    """`next_s` is infinite while a worker is being asked."""

    line: str
    refusal: Refusal
    since_s: float
    next_s: float
    until_s: float


@dataclass(slots=True)
class WaitingRoom:
    """The requests of one line are tried in their order, and wait for the first of them."""

    _waits: dict[str, _Wait] = field(default_factory=dict)  # request id |-> wait
    _lines: dict[str, dict[str, None]] = field(default_factory=dict)  # line |-> ids, in order

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waits

    def __iter__(self) -> Iterator[str]:
        return iter(self._waits)

    def __len__(self) -> int:
        return len(self._waits)

    def due(self) -> Iterator[str]:
        """Those for which no worker is being asked."""
        return (name for name, wait in self._waits.items() if wait.next_s < inf)

    def try_wait(
        self, request_id: str, line: str, refusal: Refusal, patience_s: float, now_s: float
    ) -> bool:
        """Returns False when it has waited long enough."""
        wait = self._waits.get(request_id)
        since_s = now_s if wait is None else wait.since_s
        until_s = now_s + patience_s if wait is None else wait.until_s
        if now_s >= until_s:
            return False
        next_s = now_s + ASK_AGAIN_S
        self._waits[request_id] = _Wait(
            line=line, refusal=refusal, since_s=since_s, next_s=next_s, until_s=until_s
        )
        self._lines.setdefault(line, {})[request_id] = None
        return True

    def wake(self, now_s: float) -> None:
        """A slot is free: the first of each line may be tried at once."""
        for line in self._lines.values():
            self._wake_first(line, now_s)

    def follow(self, request_id: str, now_s: float) -> None:
        """If a worker is being asked for it now, the next of its line may be tried at once: more
        than one slot may be free."""
        wait = self._waits.get(request_id)
        if wait is not None and wait.next_s == inf:
            self._wake_first(self._lines[wait.line], now_s)

    def take_next(self, now_s: float) -> tuple[str, Refusal] | None:
        """The request whose turn it is, and its last refusal. It waits on if refused again."""
        if not self._lines:
            return None
        firsts = (self._first(line) for line in self._lines.values())
        due = (name for name in firsts if name and self._waits[name].next_s <= now_s)
        if (name := next(due, None)) is None:
            return None
        wait = self._waits[name]
        self._waits[name] = replace(wait, next_s=inf)
        return name, wait.refusal

    def _wake_first(self, line: dict[str, None], now_s: float) -> None:
        name = self._first(line)
        if name is not None:
            wait = self._waits[name]
            self._waits[name] = replace(wait, next_s=min(wait.next_s, now_s))

    def _first(self, line: dict[str, None]) -> str | None:
        """The first of the line for which no worker is being asked."""
        return next((name for name in line if self._waits[name].next_s < inf), None)

    def waited_s(self, request_id: str, now_s: float) -> float:
        """0 for a request that is not here."""
        wait = self._waits.get(request_id)
        return 0.0 if wait is None else now_s - wait.since_s

    def leave(self, request_id: str) -> None:
        wait = self._waits.pop(request_id, None)
        if wait is not None:
            line = self._lines[wait.line]
            del line[request_id]
            if not line:
                del self._lines[wait.line]
