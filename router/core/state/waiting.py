"""Requests that wait at the router. Pure.

A displaced request was admitted and has lost its worker; a deferred one was not admitted yet. While
a displaced request waits, each worker that could hold it keeps a place for it, and all of its
places where memory is what is missing: no deferred or new request of its tier or a lower one gets
these, nor a displaced one of a lower tier. A request that no worker could hold keeps nobody out,
nor does one for which a worker is being asked.

The first of each line is tried again as soon as a slot is free or workers come or go. Otherwise it
is tried from time to time, since memory and pace may suffice by then; reports of workers are the
clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from kvrelay.errors import RefusalReason
from kvrelay.types import Incarnation
from router.core.promises.refusal import Refusal

FAILOVER_PATIENCE_S = 600.0
"""How long a displaced request without a deadline waits, unless the cluster file says otherwise."""
ASK_AGAIN_S = 0.25
"""While no slot is free."""


class WaitingLine(NamedTuple):
    """Requests of one tier that are tried in their order. `workers` could each hold a displaced
    request of this line; None: its requests are deferred."""

    priority: int
    tier: str
    workers: frozenset[Incarnation] | None = None

    @property
    def turn(self) -> tuple[int, bool]:
        return self.priority, self.workers is None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    """`next_s` is infinite while a worker is being asked. It is never before `held_s`. `places`: so
    many it needs of one worker."""

    line: WaitingLine
    refusal: Refusal
    since_s: float
    next_s: float
    until_s: float
    held_s: float = 0.0
    places: int = 1

    @property
    def kept(self) -> float:
        """Places that each worker keeps for it."""
        if self.next_s == inf:
            return 0
        return inf if self.refusal.reason == RefusalReason.KV_EXHAUSTED else self.places


@dataclass(slots=True)
class WaitingRoom:
    """The requests of one line wait for the first of them. `displaced`: the lines of those."""

    displaced: set[WaitingLine] = field(default_factory=set)
    _waits: dict[str, _Wait] = field(default_factory=dict)  # request id |-> wait
    _lines: dict[WaitingLine, dict[str, None]] = field(default_factory=dict)  # ids, in order

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waits

    def __iter__(self) -> Iterator[str]:
        return iter(self._waits)

    def __len__(self) -> int:
        return len(self._waits)

    def due(self) -> Iterator[str]:
        """Those for which no worker is being asked."""
        return (name for name, wait in self._waits.items() if wait.next_s < inf)

    def kept(self, priority: int) -> Mapping[Incarnation, float]:
        """# worker |-> its places that are for displaced requests of a priority before this one"""
        places: defaultdict[Incarnation, float] = defaultdict(float)
        for line in self.displaced:
            if line.priority < priority:
                count = sum(self._waits[name].kept for name in self._lines[line])
                for worker in line.workers or ():
                    places[worker] += count
        return {worker: count for worker, count in places.items() if count}

    def try_wait(
        self,
        request_id: str,
        line: WaitingLine,
        refusal: Refusal,
        patience_s: float,
        now_s: float,
        *,
        held_s: float = 0.0,
        places: int = 1,
    ) -> bool:
        """Returns False when it has waited long enough. It keeps its turn if it waits already,
        unless it could use other workers now. It is not tried before `held_s`, unless it is
        released."""
        wait = self._waits.get(request_id)
        since_s = now_s if wait is None else wait.since_s
        until_s = now_s + patience_s if wait is None else wait.until_s
        if now_s >= until_s:
            return False
        if wait is not None and wait.line != line:
            self._leave_line(request_id, wait.line)
        self._waits[request_id] = _Wait(
            line=line,
            refusal=refusal,
            since_s=since_s,
            next_s=held_s or now_s + ASK_AGAIN_S,
            until_s=until_s,
            held_s=held_s,
            places=places,
        )
        self._enter_line(request_id, line)
        return True

    def move(self, request_id: str, line: WaitingLine) -> None:
        """It could use other workers now."""
        wait = self._waits[request_id]
        if wait.line != line:
            self._leave_line(request_id, wait.line)
            self._waits[request_id] = replace(wait, line=line)
            self._enter_line(request_id, line)

    def wake(self, now_s: float) -> None:
        """A slot is free: the first of each line may be tried at once."""
        for line in self._lines.values():
            self._wake_first(line, now_s)

    def hold(self, names: Iterable[str], until_s: float) -> None:
        """They are not tried before this time, unless they are released, or a worker is being
        asked for them already."""
        for name in names:
            wait = self._waits.get(name)
            if wait is not None and wait.next_s < inf:
                self._waits[name] = replace(wait, next_s=until_s, held_s=until_s)

    def release(self, names: Iterable[str], now_s: float) -> None:
        """They are held no longer: they may be tried at once."""
        for name in names:
            wait = self._waits.get(name)
            if wait is not None and wait.held_s:
                self._waits[name] = replace(wait, next_s=now_s, held_s=0.0)

    def wake_all(self, now_s: float) -> None:
        """Each may be tried as soon as it is the first of its line."""
        for name in [*self.due()]:
            self._wake(name, now_s)

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
        firsts = (self._first(line) for line in self._in_turn())
        due = (name for name in firsts if name and self._waits[name].next_s <= now_s)
        if (name := next(due, None)) is None:
            return None
        wait = self._waits[name]
        self._waits[name] = replace(wait, next_s=inf, held_s=0.0)
        return name, wait.refusal

    def _in_turn(self) -> Iterable[dict[str, None]]:
        if not self.displaced:
            return self._lines.values()
        return [self._lines[line] for line in sorted(self._lines, key=lambda one: one.turn)]

    def _wake_first(self, line: dict[str, None], now_s: float) -> None:
        name = self._first(line)
        if name is not None:
            self._wake(name, now_s)

    def _wake(self, name: str, now_s: float) -> None:
        wait = self._waits[name]
        if now_s >= wait.held_s:
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
            self._leave_line(request_id, wait.line)

    def _enter_line(self, request_id: str, line: WaitingLine) -> None:
        self._lines.setdefault(line, {})[request_id] = None
        if line.workers is not None:
            self.displaced.add(line)

    def _leave_line(self, request_id: str, line: WaitingLine) -> None:
        waiting = self._lines[line]
        del waiting[request_id]
        if not waiting:
            del self._lines[line]
            self.displaced.discard(line)

    def validate(self) -> None:
        assert self.displaced == {line for line in self._lines if line.workers is not None}
        for name, wait in self._waits.items():
            assert name in self._lines[wait.line], f"{name} is in no line"
        assert sum(map(len, self._lines.values())) == len(self._waits)
