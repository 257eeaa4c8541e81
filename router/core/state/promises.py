"""When refused requests may come back, and what was promised to others by then. Pure.

A refusal names a time. It is a promise: work of that size is counted as if it were waiting already,
so that who came later isn't served first. Not all clients come back; what is promised counts for
the share of promises that were claimed lately. The line, behind which a time is named, counts each
by that share when it was made: were all of it counted anew, times that are named now would fall
among those that were named before. And times are put off by as much as it takes for those that come
back to be admitted.

How many clients come back for what they were promised. Pure.

Those that had come back already and were refused again are counted apart: who tries only once more
isn't there a third time.

When the next place will be free: the running mean gap between ended requests. Pure.

Why a request is not taken now, and when it may come back. Pure values.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from operator import itemgetter

from kvrelay.errors import RefusalReason
from kvrelay.types import value
from router.core.state.generation import GenerationRequest

_NEW_SHARE = 0.05
_DOUBTED = 3
"""As if so many had not come back, at first."""


@dataclass(slots=True)
class Share:
    """The mean of the first ones, then of the latest."""

    value: float = 0.0
    _learnt: int = 0

    def learn(self, claimed: bool) -> None:
        self._learnt += 1
        new_share = max(_NEW_SHARE, 1 / (self._learnt + _DOUBTED))
        self.value += new_share * (claimed - self.value)


@dataclass(slots=True)
class Claims:
    first: Share = field(default_factory=Share)
    again: Share = field(default_factory=Share)

    def of(self, again: bool) -> Share:
        return self.again if again else self.first


EARLY_S = 0.05
"""A client may come back that much sooner, its clock being its own."""
GRACE_S = 1.25
"""A promise is held for so long after its time: HTTP's `retry-after` counts whole seconds. While it
is held, it keeps others out."""
MOST_PROMISES = 50_000
KEPT_SHARE = 0.92
"""Of the promises that clients come back for, so many are to be kept."""
_STEP_S = 0.25
_MOST_DELAY_S = 4.0


@value
class Promised:
    """The work of several promises: seconds of prefill, sequences and their contexts."""

    prefill_s: float = 0.0
    sequences: float = 0.0
    kv_tokens: float = 0.0

    def times(self, factor: float) -> Promised:
        return Promised(
            prefill_s=self.prefill_s * factor,
            sequences=self.sequences * factor,
            kv_tokens=self.kv_tokens * factor,
        )

    def __add__(self, other: Promised) -> Promised:
        return Promised(
            prefill_s=self.prefill_s + other.prefill_s,
            sequences=self.sequences + other.sequences,
            kv_tokens=self.kv_tokens + other.kv_tokens,
        )


NOTHING_PROMISED = Promised()
_due_s = itemgetter(0)


@value
class Promise:
    """`likely`: of the work, and of as much of other routers, what was expected when it was made.
    `again`: to one that had come back for another."""

    due_s: float
    until_s: float
    work: Promised
    likely: Promised
    priority: int
    again: bool


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
    """Of one router. A request that comes again is known by its digest. Nothing is kept for
    clients before some have come back: a burst of those that don't would shut out all others."""

    claims: Claims = field(default_factory=Claims)
    delay_s: float = _STEP_S
    claimed: int = 0  # neither kept, broken nor given up yet
    kept: int = 0
    broken: int = 0
    expired: int = 0
    _open: dict[int, Promise] = field(default_factory=dict)  # digest |-> promise
    _by_due: list[tuple[float, int]] = field(default_factory=list)  # ascending
    _ends: list[tuple[float, int]] = field(default_factory=list)  # heap of until_s and digest
    _all: dict[int, Promised] = field(default_factory=dict)  # priority |-> likely, of those open
    _earlier: _Earlier = field(default_factory=_Earlier)

    def __len__(self) -> int:
        return len(self._open)

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
    ) -> float:
        """In how many seconds to come back: what is told. Replaces the one that the same request
        had. `all_by_own`: the promises of all routers by those of this one."""
        self._take(digest)
        retry_after_s = soonest_s + self.delay_s
        if len(self._open) < MOST_PROMISES:
            due_s = now_s + retry_after_s
            promise = Promise(
                due_s=due_s,
                until_s=due_s + GRACE_S,
                work=work,
                likely=work.times(self.claims.of(again).value * all_by_own),
                priority=priority,
                again=again,
            )
            self._keep(digest, promise)
        return retry_after_s

    def _keep(self, digest: int, promise: Promise) -> None:
        self._open[digest] = promise
        line = self._all.get(promise.priority, NOTHING_PROMISED)
        self._all[promise.priority] = line + promise.likely
        if promise.due_s < self._earlier.until_s:
            self._earlier.add(promise)
        insort(self._by_due, (promise.due_s, digest))
        heappush(self._ends, (promise.until_s, digest))

    def settle(self, *, kept: bool) -> None:
        """One that was claimed. The delay is where `KEPT_SHARE` of them are kept: a quantile
        that is followed (Robbins and Monro, 1951)."""
        self.claimed -= 1
        self.kept += kept
        self.broken += not kept
        step_s = _STEP_S * (KEPT_SHARE - kept)
        self.delay_s = max(0.0, min(_MOST_DELAY_S, self.delay_s + step_s))

    def claim(self, digest: int, now_s: float) -> Promise | None:
        """The promise that the request comes back for, if it has one and it is time."""
        self._expire(now_s)
        promise = self._open.get(digest)
        if promise is None or now_s < promise.due_s - EARLY_S:
            return None
        self._take(digest)
        self.claims.of(promise.again).learn(True)
        self.claimed += 1
        return promise

    def give_up(self) -> None:
        """A request with a claimed promise has ended before it was kept or broken."""
        self.claimed -= 1

    def line(self, priority: int = 0) -> Promised:
        """All that was promised, by any router, of this priority or before it."""
        return sum_of(work for other, work in self._all.items() if other <= priority)

    def before(self, end_s: float, priority: int = 0) -> Promised:
        """What was promised for an earlier time, of this priority or before it."""
        self._look_until(end_s)
        return sum_of(
            work.times(self.claims.of(again).value)
            for (other, again), work in self._earlier.works.items()
            if other <= priority
        )

    def _look_until(self, end_s: float) -> None:
        """Costs as much as there are promises between this moment and the one before."""
        earlier, by_due = self._earlier, self._by_due
        sign = 1 if end_s > earlier.until_s else -1
        first, last = sorted(bisect_left(by_due, s, key=_due_s) for s in (earlier.until_s, end_s))
        for _, digest in by_due[first:last]:
            earlier.add(self._open[digest], sign)
        earlier.until_s = end_s

    def _expire(self, now_s: float) -> None:
        """Nobody came back for these."""
        while self._ends and self._ends[0][0] < now_s:
            until_s, digest = heappop(self._ends)
            promise = self._open.get(digest)
            if promise is not None and promise.until_s == until_s:
                self._take(digest)
                self.expired += 1
                self.claims.of(promise.again).learn(False)

    def _take(self, digest: int) -> None:
        promise = self._open.pop(digest, None)
        if promise is not None:
            del self._by_due[bisect_left(self._by_due, (promise.due_s, digest))]
            self._all[promise.priority] += promise.likely.times(-1)
            if promise.due_s < self._earlier.until_s:
                self._earlier.add(promise, -1)
            if not self._open:
                self._all.clear()  # and with it what rounding left


def sum_of(works: Iterable[Promised]) -> Promised:
    return sum(works, NOTHING_PROMISED)


def digest_of(asked: GenerationRequest) -> int:
    """Of what a client that tries again sends again."""
    return hash((asked.tenant, asked.prompt_ids, asked.sampling.max_tokens, asked.sampling.n))


FIRST_RETRY_S = 1.0
SHORTEST_RETRY_S = 0.05
LONGEST_RETRY_S = 30.0
_WEIGHT = 0.2


@dataclass(slots=True)
class ReleaseClock:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """`reason` is a RefusalReason, or what a worker has named. `retry_after_s`: when the request
    would be taken, if that is known, and `work` how much work that would be. `hopeless`: never, as
    the cluster is."""

    reason: str
    message: str
    retry_after_s: float | None = None
    hopeless: bool = False
    work: Promised | None = None


NO_CAPACITY = Refusal(
    reason=RefusalReason.NO_CAPACITY, message="no prefill and decode worker is ready to serve"
)
BEHIND_DISPLACED = Refusal(
    reason=RefusalReason.SLOTS_EXHAUSTED,
    message="the places that are left are for requests that have lost their worker",
)
DRAINING = Refusal(
    reason=RefusalReason.DRAINING, message="every worker that could serve it is draining"
)


def refused_by_worker(reason: str) -> Refusal:
    messages: Mapping[str, str] = {
        RefusalReason.SLOTS_EXHAUSTED: "all places of every decode worker are taken",
        RefusalReason.KV_EXHAUSTED: "no decode worker has KV blocks left for this prompt",
        RefusalReason.TPOT_UNREACHABLE: "every decode worker has too much to decode",
        RefusalReason.TIER_SHARE_EXHAUSTED: "the places that are left are those of other tiers",
        RefusalReason.DRAINING: "the worker is draining",
    }
    return Refusal(reason=reason, message=messages.get(reason, reason))
