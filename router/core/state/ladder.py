"""What is done when a tier's latencies leave its objectives although requests were admitted for
them: step by step, and back with hysteresis. Pure.

    normal -> tighten -> cap output -> trip

Admission itself lets a few in a hundred miss an objective. A step up needs evidence that more do:
their share, less three of its own standard errors, over groups of requests that came one after
another. So it takes at least `FEWEST` requests, and one bad moment is not enough, however many it
made late. Steps up are at least `hold_s` apart, upon requests that came since the last one. A step
down comes after `calm_s` in which no larger share missed it than may, or without requests.

How many of the latest requests missed an objective, and the latest latencies. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf, sqrt

from kvrelay.qos import LadderRules, QosTier, QosTiers
from kvrelay.types import NO_OBJECTIVES

_MOST = 20_000
"""Of more only the latest are kept."""


@dataclass(slots=True, kw_only=True)
class Recent:
    """Those of the last `window_s`."""

    window_s: float
    _latest: deque[tuple[float, float]] = field(default_factory=deque)  # (when, seconds)
    _ascending: list[float] = field(default_factory=list)

    def observe(self, seconds: float, now_s: float) -> None:
        self._latest.append((now_s, seconds))
        insort(self._ascending, seconds)
        if len(self._latest) > _MOST:
            self._drop_oldest()

    def quantile(self, share: float, now_s: float) -> float | None:
        """None where too few are known for one of them to lie beyond it: 100 for 0.99."""
        while self._latest and self._latest[0][0] < now_s - self.window_s:
            self._drop_oldest()
        known = len(self._ascending)
        return None if known < round(1 / (1 - share)) else self._ascending[int(share * known)]

    def _drop_oldest(self) -> None:
        _, seconds = self._latest.popleft()
        del self._ascending[bisect_left(self._ascending, seconds)]


GROUP, FEWEST_GROUPS = 25, 4
FEWEST = GROUP * FEWEST_GROUPS
"""A level changes upwards on no fewer requests. Those of a group are taken to be late for the same
reason, so only groups tell how sure a share is."""
ERRORS = 3.0
"""A share is larger than allowed if it is by so many standard errors, which are those of four
groups and more: 97 % of a t distribution with three degrees of freedom."""


@dataclass(slots=True, kw_only=True)
class Misses:
    """Of the requests of the last `window_s`, those over `bound_s`."""

    bound_s: float
    window_s: float
    _groups: deque[tuple[float, int]] = field(default_factory=deque)  # (its last, missed)
    _missed: int = 0  # of all groups
    _squares: int = 0
    _open: int = 0  # requests of the group that is not full yet
    _open_missed: int = 0
    _open_s: float = -inf

    def observe(self, seconds: float, now_s: float) -> None:
        self._open_s = now_s
        self._open += 1
        self._open_missed += seconds > self.bound_s
        if self._open == GROUP:
            self._count(self._open_missed, 1)
            self._groups.append((now_s, self._open_missed))
            self._open = self._open_missed = 0

    def _count(self, missed: int, sign: int) -> None:
        self._missed += sign * missed
        self._squares += sign * missed**2

    def look(self, now_s: float) -> None:
        """Forgets what is older."""
        while self._groups and self._groups[0][0] < now_s - self.window_s:
            self._count(self._groups.popleft()[1], -1)
        if self._open_s < now_s - self.window_s:
            self._open = self._open_missed = 0

    @property
    def known(self) -> int:
        return GROUP * len(self._groups) + self._open

    @property
    def share(self) -> float:
        return (self._missed + self._open_missed) / self.known if self.known else 0.0

    @property
    def at_least(self) -> float:
        """The share, less its error; 0 of fewer than `FEWEST`."""
        groups = len(self._groups)
        if groups < FEWEST_GROUPS:
            return 0.0
        mean = self._missed / groups
        variance = max(0.0, self._squares / groups - mean**2) / (groups - 1)
        return (mean - ERRORS * sqrt(variance)) / GROUP


LOOKS_EVERY_S = 0.1


class LadderStep(IntEnum):
    """Each includes those before it. `TRIP`: only the tier's reserve is served, or one request."""

    NORMAL = 0
    TIGHTEN = 1
    CAP = 2
    TRIP = 3


@dataclass(slots=True)
class Watched:
    """Latencies of one kind, and how many missed the objective, or are `tail` times over it."""

    kind: str
    latest: Recent
    over: Misses
    far_over: Misses

    @staticmethod
    def of(kind: str, objective_s: float, rules: LadderRules) -> Watched:
        window_s = rules.window_s
        return Watched(
            kind,
            Recent(window_s=window_s),
            Misses(bound_s=objective_s, window_s=window_s),
            Misses(bound_s=rules.tail * objective_s, window_s=window_s),
        )

    def observe(self, seconds: float, now_s: float) -> None:
        self.latest.observe(seconds, now_s)
        self.over.observe(seconds, now_s)
        self.far_over.observe(seconds, now_s)

    def look(self, now_s: float) -> None:
        self.over.look(now_s)
        self.far_over.look(now_s)


@dataclass(slots=True, kw_only=True)
class Ladder:
    """Of one tier."""

    tier: QosTier
    rules: LadderRules
    step: LadderStep = LadderStep.NORMAL
    ttft: Watched | None = field(init=False)
    tpot: Watched | None = field(init=False)
    stepped_s: float = -inf
    _uneasy_s: float = -inf  # when too many had missed an objective

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        """What was there before a step says nothing of what the step did."""
        asked, rules = self.tier.objectives, self.rules
        self.ttft = None if asked.ttft_s is None else Watched.of("TTFT", asked.ttft_s, rules)
        self.tpot = None if asked.tpot_s is None else Watched.of("TPOT", asked.tpot_s, rules)

    @property
    def watched(self) -> list[Watched]:
        return [one for one in (self.ttft, self.tpot) if one is not None]

    def climb(self, now_s: float) -> str | None:
        """Takes a step up or down, and says why; None: it stays."""
        for one in self.watched:
            one.look(now_s)
        if any(one.over.share > self.rules.missed for one in self.watched):
            self._uneasy_s = now_s
        if self.step < LadderStep.TRIP and now_s - self.stepped_s >= self.rules.hold_s:
            cause = next(self._causes(), None)
            if cause is not None:
                self._to(LadderStep(self.step + 1), now_s)
                return cause
        if self.step > LadderStep.NORMAL and self.falls_in_s(now_s) <= 0:
            self._to(LadderStep(self.step - 1), now_s)
            return f"within its objectives for {self.rules.calm_s:g} s"
        return None

    def falls_in_s(self, now_s: float) -> float:
        """Until the next step down, if it stays calm."""
        return max(self.stepped_s, self._uneasy_s) + self.rules.calm_s - now_s

    def _to(self, step: LadderStep, now_s: float) -> None:
        self.step, self.stepped_s = step, now_s
        self._begin()

    def _causes(self) -> Iterator[str]:
        """It trips only where too many are far over."""
        for one in self.watched:
            misses = one.far_over if self.step is LadderStep.CAP else one.over
            if misses.at_least > self.rules.missed:
                missed, bound_ms = round(misses.share * misses.known), misses.bound_s * 1e3
                yield f"{one.kind} of {missed} of {misses.known} was over {bound_ms:.0f} ms"


class Ladders:
    """The ladders of all tiers that have objectives; there are none without rules. `next_look_s`:
    before that, `climb` does nothing."""

    def __init__(self, tiers: QosTiers) -> None:
        rules = tiers.ladder
        self._of = {
            tier.name: Ladder(tier=tier, rules=rules)
            for tier in tiers.tiers
            if rules is not None and tier.objectives != NO_OBJECTIVES
        }
        self.next_look_s = -inf if self._of else inf

    def __iter__(self) -> Iterator[Ladder]:
        return iter(self._of.values())

    def climb(self, now_s: float) -> list[tuple[Ladder, str]]:
        """(ladder that took a step, why)"""
        if now_s < self.next_look_s:
            return []
        self.next_look_s = now_s + LOOKS_EVERY_S
        steps = ((ladder, ladder.climb(now_s)) for ladder in self)
        return [(ladder, cause) for ladder, cause in steps if cause is not None]

    def highest(self, tier: QosTier) -> Ladder | None:
        """That of the tier, or of one that goes before it, which has climbed most; None: none
        has."""
        climbed = (
            one
            for one in self
            if one.step and (one.tier is tier or one.tier.priority < tier.priority)
        )
        return max(climbed, key=lambda one: one.step, default=None)

    def saw_ttft(self, tier: str, seconds: float, *, begun_s: float, now_s: float) -> None:
        ladder = self._judged(tier, begun_s)
        if ladder is not None and ladder.ttft is not None:
            ladder.ttft.observe(seconds, now_s)

    def saw_tpot(self, tier: str, seconds: float, *, begun_s: float, now_s: float) -> None:
        ladder = self._judged(tier, begun_s)
        if ladder is not None and ladder.tpot is not None:
            ladder.tpot.observe(seconds, now_s)

    def _judged(self, tier: str, begun_s: float) -> Ladder | None:
        """What was there before a step says nothing of what the step did."""
        ladder = self._of.get(tier)
        return None if ladder is None or begun_s < ladder.stepped_s else ladder
