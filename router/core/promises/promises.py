"""When refused requests may come back, and what was promised to others by then. Pure.

A refusal names a time. It is a promise: work of that size is counted as if it were waiting already,
so that who came later isn't served first. Each refusal has its own promise, known by its id. The
client may bring it back to any router; who comes without one takes the oldest due promise to a
request like its own.

    told --> open --> claimed --> kept, broken or given up
              |
              '--> expired        nobody came for it in time
    told --> forgotten            too many are open: no place is held for it

Not all clients come back. What is expected to come soon counts for the share of promises that were
claimed lately. The line, behind which a time is named, counts each by that share when it was made:
were all of it counted anew, times that are named now would fall among those that were named before.
Before anything is known newcomers are not kept out, but the line counts all that were told a time.
And times are put off by as much as it takes for those that come back to be admitted.

Routers do not tell each other their promises. One that was made elsewhere and is claimed here
stands for one of this router that is claimed elsewhere: then the oldest due one is held no longer,
or else the next to expire is not counted as lost.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf, sqrt
from operator import itemgetter

from kvrelay.types import value
from router.core.promises.claims import Claims
from router.core.promises.work import NOTHING_PROMISED, Promised, ToldPromise, sum_of

EARLY_S = 0.05
"""A client may come back that much sooner, its clock being its own."""
GRACE_S = 1.25
"""A promise is held for so long after its time: HTTP's `retry-after` counts whole seconds. While it
is held, it keeps others out."""
SKEW_S = 0.5
"""The wall clocks of two hosts may differ by so much."""
SOON_S = 0.5
"""A promised retry further away than this does not compete with a request that is admitted now: the
worker will have finished it."""
WIDE_S = 3.0
"""Over so long a time the number of its own promises tells that of others'."""
MOST_PROMISES = 50_000
KEPT_SHARE = 0.97
"""Of the promises that clients come back for, so many are to be kept."""
_STEP_S = 0.25
_MOST_DELAY_S = 4.0
_due_s = itemgetter(0)


@value
class Promise:
    """`digest`: of the request that it was made to. `likely`: of the work, and of as much of other
    routers, what was expected when it was made. `again`: to one that had come back for another."""

    promise_id: int
    digest: int
    due_s: float
    work: Promised
    likely: Promised = NOTHING_PROMISED
    priority: int = 0
    again: bool = False

    @property
    def until_s(self) -> float:
        return self.due_s + GRACE_S

    def told(self, now_s: float) -> ToldPromise:
        return ToldPromise(
            promise_id=self.promise_id,
            due_in_s=self.due_s - now_s,
            work=self.work,
            again=self.again,
        )


@dataclass(slots=True)
class _Earlier:
    """The work of all promises that are due before `until_s`, by priority and by `again`. As that
    moment moves on, each promise is added once."""

    until_s: float = -inf
    works: dict[tuple[int, bool], Promised] = field(default_factory=dict)
    _counts: Counter[tuple[int, bool]] = field(default_factory=Counter)

    def add(self, promise: Promise, sign: int = 1) -> None:
        """With the last one of its kind goes what rounding has left: nothing is ahead then."""
        kind = (promise.priority, promise.again)
        self._counts[kind] += sign
        if self._counts[kind]:
            before = self.works.get(kind, NOTHING_PROMISED)
            self.works[kind] = before + promise.work.times(sign)
        else:
            del self._counts[kind], self.works[kind]


@dataclass(slots=True)
class Promises:
    """Of one router. `ids` are different from those of other routers. `elsewhere`: claims of other
    routers' promises for which none of this one was given up yet."""

    ids: Iterator[int] = field(default_factory=count)
    claims: Claims = field(default_factory=Claims)
    delay_s: float = _STEP_S
    told: int = 0
    claimed: int = 0  # neither kept, broken nor given up yet
    kept: int = 0
    broken: int = 0
    given_up: int = 0
    expired: int = 0
    forgotten: int = 0
    elsewhere: int = 0
    _open: dict[int, Promise] = field(default_factory=dict)  # id |-> promise
    _alike: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """# digest |-> when its promises are due, and their ids, ascending"""
    _by_due: list[tuple[float, int]] = field(default_factory=list)  # ascending
    _ends: list[tuple[float, int]] = field(default_factory=list)  # heap of until_s and id
    _used: set[int] = field(default_factory=set)  # ids that were brought back
    _used_ends: list[tuple[float, int]] = field(default_factory=list)  # heap: when none is valid
    _all: dict[int, Promised] = field(default_factory=dict)  # priority |-> likely, of those open
    _near: _Earlier = field(default_factory=_Earlier)
    _far: _Earlier = field(default_factory=_Earlier)

    def __len__(self) -> int:
        return len(self._open)

    # --- made -----------------------------------------------------------------------------------

    def make(
        self,
        digest: int,
        work: Promised,
        soonest_s: float,
        now_s: float,
        priority: int = 0,
        *,
        again: bool = False,
        all_by_own: float = 1.0,
    ) -> ToldPromise:
        """`all_by_own`: the promises of all routers by those of this one."""
        self.expire(now_s)
        promise = Promise(
            promise_id=next(self.ids),
            digest=digest,
            due_s=now_s + soonest_s + self.delay_s,
            work=work,
            likely=work.times(self.claims.of(again).planned * all_by_own),
            priority=priority,
            again=again,
        )
        self.told += 1
        if len(self._open) < MOST_PROMISES:
            self._keep(promise)
        else:
            self.forgotten += 1
        return promise.told(now_s)

    def _keep(self, promise: Promise) -> None:
        self._open[promise.promise_id] = promise
        line = self._all.get(promise.priority, NOTHING_PROMISED)
        self._all[promise.priority] = line + promise.likely
        self._look_at(promise, 1)
        due = (promise.due_s, promise.promise_id)
        insort(self._by_due, due)
        insort(self._alike.setdefault(promise.digest, []), due)
        heappush(self._ends, (promise.until_s, promise.promise_id))

    # --- claimed --------------------------------------------------------------------------------

    def claim(self, digest: int, now_s: float, told: ToldPromise | None = None) -> Promise | None:
        """The promise that the request comes back for, if it has one and it is time. It brings
        `told`, or comes without."""
        self.expire(now_s)
        promise = self._next_alike(digest, now_s) if told is None else self._due(told, now_s)
        if promise is None:
            return None
        self._redeem(promise, now_s, was_told=told is not None)
        self.claimed += 1
        return promise

    def early(self, told: ToldPromise, now_s: float) -> Promise | None:
        """What it was brought back for before its time."""
        promise = self._known(told, now_s)
        return promise if promise is not None and now_s < promise.due_s else None

    def served_early(self, promise: Promise, now_s: float) -> None:
        """Its request was admitted before its time."""
        if promise.promise_id not in self._used:
            self._redeem(promise, now_s, was_told=True)
            self.kept += 1

    def _next_alike(self, digest: int, now_s: float) -> Promise | None:
        """The oldest of those to a request like this one, if it is due."""
        alike = self._alike.get(digest)
        promise = self._open[alike[0][1]] if alike else None
        return promise if promise is not None and now_s >= promise.due_s - EARLY_S else None

    def _due(self, told: ToldPromise, now_s: float) -> Promise | None:
        promise = self._known(told, now_s)
        if promise is None:
            return None
        early_s = EARLY_S if told.promise_id in self._open else EARLY_S + SKEW_S
        return promise if now_s >= promise.due_s - early_s else None

    def _known(self, told: ToldPromise, now_s: float) -> Promise | None:
        """None: it was brought back before, or is too old. This router's own clock counts for its
        own promises."""
        if told.promise_id in self._used or told.due_in_s < -GRACE_S - SKEW_S:
            return None
        return self._open.get(told.promise_id) or Promise(
            promise_id=told.promise_id,
            digest=0,
            due_s=now_s + told.due_in_s,
            work=told.work,
            again=told.again,
        )

    def _redeem(self, promise: Promise, now_s: float, *, was_told: bool) -> None:
        """A promise that came without its id may still be brought back: then it stands for that of
        the one that came without."""
        self.claims.of(promise.again).learn(True)
        if was_told:
            self._used.add(promise.promise_id)
            heappush(self._used_ends, (promise.until_s + 2 * SKEW_S, promise.promise_id))
        if not self._take(promise.promise_id):
            self._stand_in(now_s)

    def _stand_in(self, now_s: float) -> None:
        oldest = self._by_due[0] if self._by_due else (inf, 0)
        if oldest[0] <= now_s:
            self._take(oldest[1])
        else:
            self.elsewhere += 1

    def settle(self, *, kept: bool) -> None:
        """One that was claimed. The delay is where `KEPT_SHARE` of them are kept: a quantile
        that is followed (Robbins and Monro, 1951)."""
        self.claimed -= 1
        self.kept += kept
        self.broken += not kept
        step_s = _STEP_S * (KEPT_SHARE - kept)
        self.delay_s = max(0.0, min(_MOST_DELAY_S, self.delay_s + step_s))

    def give_up(self) -> None:
        """A request with a claimed promise has ended before it was kept or broken."""
        self.claimed -= 1
        self.given_up += 1

    # --- ahead ----------------------------------------------------------------------------------

    def line(self, priority: int = 0) -> Promised:
        """All that was promised, by any router, of this priority or before it."""
        return sum_of(work for other, work in self._all.items() if other <= priority)

    def soon(self, now_s: float, priority: int, all_by_own: float) -> Promised:
        """What may come within `SOON_S`, to any router: what is expected, and a standard deviation.
        Of what comes to others only the usual number is known, by its own over a longer time."""
        self.expire(now_s)
        expected = self._before(now_s + SOON_S, priority, self._near)
        if all_by_own > 1:
            usual = self._before(now_s + WIDE_S, priority, self._far).times(SOON_S / WIDE_S)
            expected += usual.times(all_by_own - 1)
        more = sqrt(expected.sequences)
        return expected.times(1 + more / expected.sequences) if more else expected

    def before(self, end_s: float, priority: int = 0) -> Promised:
        """What was promised for an earlier time, of this priority or before it."""
        return self._before(end_s, priority, self._near)

    def _before(self, end_s: float, priority: int, earlier: _Earlier) -> Promised:
        self._look_until(end_s, earlier)
        return sum_of(
            work.times(self.claims.of(again).value)
            for (other, again), work in earlier.works.items()
            if other <= priority
        )

    def _look_at(self, promise: Promise, sign: int) -> None:
        for earlier in (self._near, self._far):
            if promise.due_s < earlier.until_s:
                earlier.add(promise, sign)

    def _look_until(self, end_s: float, earlier: _Earlier) -> None:
        """Costs as much as there are promises between this moment and the one before."""
        by_due = self._by_due
        sign = 1 if end_s > earlier.until_s else -1
        first, last = sorted(bisect_left(by_due, s, key=_due_s) for s in (earlier.until_s, end_s))
        for _, promise_id in by_due[first:last]:
            earlier.add(self._open[promise_id], sign)
        earlier.until_s = end_s

    # --- over -----------------------------------------------------------------------------------

    def expire(self, now_s: float) -> None:
        """Nobody came back for these."""
        while self._ends and self._ends[0][0] < now_s:
            _, promise_id = heappop(self._ends)
            promise = self._open.get(promise_id)
            if promise is not None:
                self._take(promise_id)
                self._lose(promise)
        while self._used_ends and self._used_ends[0][0] < now_s:
            self._used.discard(heappop(self._used_ends)[1])

    def _lose(self, promise: Promise) -> None:
        if self.elsewhere:
            self.elsewhere -= 1
        else:
            self.expired += 1
            self.claims.of(promise.again).learn(False)

    def _take(self, promise_id: int) -> bool:
        """Whether it was open."""
        promise = self._open.pop(promise_id, None)
        if promise is None:
            return False
        due = (promise.due_s, promise_id)
        del self._by_due[bisect_left(self._by_due, due)]
        alike = self._alike[promise.digest]
        del alike[bisect_left(alike, due)]
        if not alike:
            del self._alike[promise.digest]
        self._all[promise.priority] += promise.likely.times(-1)
        self._look_at(promise, -1)
        if not self._open:
            self._all.clear()  # and with it what rounding left
        return True

    def validate(self) -> None:
        """Each promise that was told is in one place, but for those that stand for others."""
        ended = self.kept + self.broken + self.given_up + self.expired + self.forgotten
        assert self.told + self.elsewhere == len(self._open) + self.claimed + ended
        assert len(self._by_due) == sum(map(len, self._alike.values())) == len(self._open)
        assert {promise_id for _, promise_id in self._used_ends} == self._used


FIRST_RETRY_S = 1.0
SHORTEST_RETRY_S = 0.05
LONGEST_RETRY_S = 30.0
_WEIGHT = 0.2


@dataclass(slots=True)
class ReleaseClock:
    """When the next place will be free: the running mean gap between ended requests."""

    _last_s: float | None = None
    _gap_s: float | None = None

    def released(self, now_s: float) -> None:
        if self._last_s is not None:
            gap_s = now_s - self._last_s
            old_s = gap_s if self._gap_s is None else self._gap_s
            self._gap_s = (1 - _WEIGHT) * old_s + _WEIGHT * gap_s
        self._last_s = now_s

    def retry_after_s(self) -> float:
        gap_s = FIRST_RETRY_S if self._gap_s is None else self._gap_s
        return min(max(gap_s, SHORTEST_RETRY_S), LONGEST_RETRY_S)
