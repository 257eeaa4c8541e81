"""What is done when a tier's latencies leave its objectives although requests were admitted for
them: step by step, and back with hysteresis. Pure.

    normal -> tighten -> cap output -> trip

A step up is taken at most every `hold_s`, upon latencies of requests that came since the last one,
the last of them only where these are far outside; a step down after `calm_s` well inside the
objectives, or without requests. A little outside is tolerated: admission lets a few in a hundred
miss their objectives.

The latest latencies of one kind, and their quantiles. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

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
        found = self.of_few(share, now_s)
        return None if len(self._ascending) < round(1 / (1 - share)) else found

    def of_few(self, share: float, now_s: float) -> float | None:
        """Of those that are known, however few: of less than 100 the worst for 0.99."""
        while self._latest and self._latest[0][0] < now_s - self.window_s:
            self._drop_oldest()
        if not self._ascending:
            return None
        return self._ascending[min(len(self._ascending) - 1, int(share * len(self._ascending)))]

    def clear(self) -> None:
        self._latest.clear()
        self._ascending.clear()

    def _drop_oldest(self) -> None:
        _, seconds = self._latest.popleft()
        del self._ascending[bisect_left(self._ascending, seconds)]


P99, P999 = 0.99, 0.999
LOOKS_EVERY_S = 0.1


class LadderStep(IntEnum):
    """Each includes those before it. `TRIP`: only the tier's reserve is served, or one request."""

    NORMAL = 0
    TIGHTEN = 1
    CAP = 2
    TRIP = 3


@dataclass(slots=True, kw_only=True)
class Ladder:
    """Of one tier."""

    tier: QosTier
    rules: LadderRules
    step: LadderStep = LadderStep.NORMAL
    ttft: Recent = field(init=False)
    tpot: Recent = field(init=False)
    stepped_s: float = -inf
    _uneasy_s: float = -inf  # when something was last outside or near its objective

    def __post_init__(self) -> None:
        self.ttft = Recent(window_s=self.rules.window_s)
        self.tpot = Recent(window_s=self.rules.window_s)

    def climb(self, now_s: float) -> str | None:
        """Takes a step up or down, and says why; None: it stays."""
        cause = next(self._outside(now_s), None)
        if cause is not None or self._is_near(now_s):
            self._uneasy_s = now_s
        if (
            cause is not None
            and self.step < LadderStep.TRIP
            and self._rested(self.rules.hold_s, now_s)
        ):
            self._to(LadderStep(self.step + 1), now_s)
            return cause
        if self.step > LadderStep.NORMAL and self.falls_in_s(now_s) <= 0:
            self._to(LadderStep(self.step - 1), now_s)
            return f"well inside its objectives for {self.rules.calm_s:g} s"
        return None

    def falls_in_s(self, now_s: float) -> float:
        """Until the next step down, if it stays calm."""
        return max(self.stepped_s, self._uneasy_s) + self.rules.calm_s - now_s

    def _rested(self, seconds: float, now_s: float) -> bool:
        return now_s - self.stepped_s >= seconds

    def _to(self, step: LadderStep, now_s: float) -> None:
        self.step, self.stepped_s = step, now_s
        self.ttft.clear()
        self.tpot.clear()

    def _outside(self, now_s: float) -> Iterator[str]:
        rules = self.rules
        far = rules.tail if self.step is LadderStep.CAP else 1.0
        for kind, recent, objective_s in self._watched():
            for name, share, bound_s in (
                ("p99", P99, far * rules.tolerance * objective_s),
                ("p99.9", P999, far * rules.tail * objective_s),
            ):
                seconds = recent.quantile(share, now_s)
                if seconds is not None and seconds > bound_s:
                    yield f"{kind} {name} is {seconds * 1e3:.0f} ms, over {bound_s * 1e3:.0f} ms"

    def _is_near(self, now_s: float) -> bool:
        """Few are enough to stay where it is."""
        for _, recent, objective_s in self._watched():
            seconds = recent.of_few(P99, now_s)
            if seconds is not None and seconds > self.rules.easing * objective_s:
                return True
        return False

    def _watched(self) -> Iterator[tuple[str, Recent, float]]:
        """(kind, latencies, objective in seconds)"""
        objectives = self.tier.objectives
        if objectives.ttft_s is not None:
            yield "TTFT", self.ttft, objectives.ttft_s
        if objectives.tpot_s is not None:
            yield "TPOT", self.tpot, objectives.tpot_s


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
        if ladder is not None:
            ladder.ttft.observe(seconds, now_s)

    def saw_tpot(self, tier: str, seconds: float, *, begun_s: float, now_s: float) -> None:
        ladder = self._judged(tier, begun_s)
        if ladder is not None:
            ladder.tpot.observe(seconds, now_s)

    def _judged(self, tier: str, begun_s: float) -> Ladder | None:
        """What was there before a step says nothing of what the step did."""
        ladder = self._of.get(tier)
        return None if ladder is None or begun_s < ladder.stepped_s else ladder
