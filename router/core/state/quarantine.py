"""Pairs of workers between which a handoff failed, kept out of placement for a while. Pure.

    trusted --failed--> quarantined --back-off over--> on trial --failed--> quarantined for twice
       ^--------------------succeeded------------------'                    as long

A handoff that was begun before the latest failure proves nothing, nor does one that was not checked
where a check has failed.

Which workers serve a request, and what speaks against two of them together. Pure values.

Pairs of workers between which KV travelled lately. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from itertools import takewhile

from kvrelay.errors import FailureReason
from kvrelay.types import Incarnation, value


@dataclass(frozen=True, slots=True)
class Pair:
    """Two workers between which KV is handed over."""

    prefill: Incarnation
    decode: Incarnation


@value
class Placement:
    """`prefill` None: the decode worker prefills too."""

    decode: Incarnation
    prefill: Incarnation | None

    @property
    def pair(self) -> Pair | None:
        return None if self.prefill is None else Pair(self.prefill, self.decode)


Against = tuple[int, float]
Objections = Callable[[Pair | None], Against]
"""How much speaks against a pair (0: nothing), and what decides among equals: the least is best."""


NOTHING_AGAINST: Against = (0, 0.0)


def trusted(_: Pair | None) -> Against:
    return NOTHING_AGAINST


FIRST_BACK_OFF_S = 5.0
LONGEST_BACK_OFF_S = 300.0
MISMATCH = FailureReason.KV_MISMATCH
SUSPICIOUS = frozenset(
    {
        MISMATCH,
        FailureReason.TRANSFER_FAILED,
        FailureReason.TRANSFER_CANCELLED,
        FailureReason.TRANSFER_TIMEOUT,
        FailureReason.HANDOFF_TIMEOUT,
        FailureReason.PEER_LOST,
    }
)
"""Reasons of a failed request that tell of the link between its two workers. Each worker says why;
`transfer_cancelled` is what the prefill worker says when the decode worker has found out first."""


class Objection(IntEnum):
    """No pair is taken while there is one with less against it."""

    NONE = 0
    QUARANTINED = 1
    FAILED_BEFORE = 2  # the very request


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """`failures` in a row; those within one quarantine count once."""

    failures: int
    failed_s: float
    until_s: float
    reason: str


@dataclass(slots=True)
class Quarantine:
    """Of one router; soft, like its view of the workers."""

    _records: dict[Pair, Record] = field(default_factory=dict)

    def failed(self, pair: Pair, reason: str, now_s: float) -> float | None:
        """For how long it is quarantined from now on; None when it was already."""
        old = self._records.get(pair)
        if old is not None and now_s < old.until_s:
            worst = MISMATCH if old.reason == MISMATCH else reason
            self._records[pair] = replace(old, failed_s=now_s, reason=worst)
            return None
        failures = 1 if old is None else old.failures + 1
        seconds = back_off_s(failures)
        self._records[pair] = Record(
            failures=failures, failed_s=now_s, until_s=now_s + seconds, reason=reason
        )
        return seconds

    def succeeded(self, pair: Pair, *, begun_s: float, checked: bool) -> bool:
        """Whether that ends a quarantine, or a trial."""
        record = self._records.get(pair)
        if record is None or begun_s < record.failed_s:
            return False
        if record.reason == MISMATCH and not checked:
            return False
        del self._records[pair]
        return True

    def forget(self, worker: Incarnation) -> None:
        """It is gone."""
        self._records = {
            pair: record
            for pair, record in self._records.items()
            if worker not in (pair.prefill, pair.decode)
        }

    def active(self, now_s: float) -> dict[Pair, Record]:
        return {pair: record for pair, record in self._records.items() if now_s < record.until_s}

    def objections(self, avoided: Collection[Pair], now_s: float) -> Objections:
        """Of a request that avoids these pairs."""
        if not avoided and not self._records:
            return trusted
        return partial(self.objection, avoided=avoided, now_s=now_s)

    def objection(
        self, pair: Pair | None, avoided: Collection[Pair], now_s: float
    ) -> tuple[Objection, float]:
        """Against a pair (None: one worker alone), and when it last failed."""
        record = self._records.get(pair) if pair is not None else None
        failed_s = 0.0 if record is None else record.failed_s
        if pair in avoided:
            return Objection.FAILED_BEFORE, failed_s
        if record is None or now_s >= record.until_s:
            return Objection.NONE, 0.0
        return Objection.QUARANTINED, failed_s


def back_off_s(failures: int) -> float:
    """5 s, doubled with each failure in a row, up to 5 min."""
    doublings = min(failures - 1, 16)
    return min(FIRST_BACK_OFF_S * 2.0**doublings, LONGEST_BACK_OFF_S)


LATELY_S = 300.0
MOST_PAIRS = 1000


@dataclass(slots=True)
class RecentPairs:
    """As the requests of one router show it."""

    _used_s: dict[Pair, float] = field(default_factory=dict)  # the latest last

    def used(self, pairs: Iterable[Pair], now_s: float) -> None:
        """KV of one request has travelled between them."""
        for pair in pairs:
            self._used_s.pop(pair, None)
            self._used_s[pair] = now_s
        while len(self._used_s) > MOST_PAIRS:
            del self._used_s[next(iter(self._used_s))]

    def lately(self, now_s: float) -> tuple[Pair, ...]:
        """The latest first."""
        used = reversed(self._used_s.items())
        recent = takewhile(lambda one: now_s - one[1] <= LATELY_S, used)
        return tuple(pair for pair, _ in recent)

    def forget(self, worker: Incarnation) -> None:
        """It is gone."""
        self._used_s = {
            pair: used_s
            for pair, used_s in self._used_s.items()
            if worker not in (pair.prefill, pair.decode)
        }
