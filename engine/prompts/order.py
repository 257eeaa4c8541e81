"""In which order prompts that wait are computed. Pure.

Decided anew for each step, so a tier gets back what it lent with the next one:

    1. prompts that waited too long, within AGED_SHARE of the time
    2. tiers within their share of recent prefill time, by priority
    3. the other tiers, by priority

and inside a tier as `Line` says. As the first kind takes its share whatever comes, nobody starves:
a prompt is computed once those that aged before it are, in AGED_SHARE of the time at worst.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic

from engine.latency import NotCovered, StepTimes, prefill_work
from engine.prompts.decaying import Decaying
from engine.prompts.line import Line, Sorted
from engine.prompts.prompt import P
from kvrelay.qos import ONE_TIER, QosTier, QosTiers

RECENT_S = 10.0
AGED_SHARE = 0.1
AGED_RECENT_S = 2.0
"""Over so long: a prompt of a tier within its share waits for a tenth of it at most."""
AGED_S = 2.0
AGED_BY_OWN = 10.0
"""A prompt has aged when it waited for AGED_S, and for so many times what it takes itself."""

_AGED = ""


@dataclass(slots=True, kw_only=True)
class Order(Generic[P]):
    """`times` are the worker's own, as corrected at the moment; None: nothing is known."""

    qos: QosTiers = ONE_TIER
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    times: StepTimes | None = None
    _lines: dict[str, Line[P]] = field(default_factory=dict)  # tier |-> its prompts
    _tiers: dict[str, QosTier] = field(init=False)
    _by_priority: list[QosTier] = field(init=False)
    _aging: Sorted[P] = field(default_factory=Sorted)
    _spent_s: Decaying = field(default_factory=lambda: Decaying(span_s=RECENT_S))
    _spent_aged_s: Decaying = field(default_factory=lambda: Decaying(span_s=AGED_RECENT_S))
    _chosen_as_aged: set[int] = field(default_factory=set)  # arrivals
    _arrivals: int = 0

    def __post_init__(self) -> None:
        self._tiers = {tier.name: tier for tier in self.qos.tiers}
        self._by_priority = sorted(self.qos.tiers, key=lambda tier: tier.priority)
        for tier in self.qos.tiers:
            served = Decaying(span_s=RECENT_S)
            self._lines[tier.name] = Line(weights=self.tenant_weights, served=served)

    def tier_of(self, prompt: P) -> str:
        name = prompt.qos_tier
        return name if name in self._tiers else self.qos.default

    # --- coming and going -----------------------------------------------------------------------

    def add(self, prompt: P, now_s: float) -> None:
        prompt.arrival, self._arrivals = self._arrivals, self._arrivals + 1
        within_s = prompt.within_s
        prompt.deadline_s = None if within_s is None else now_s + within_s
        prompt.left_s = self._seconds(prompt)
        self._aging.add(prompt, now_s + max(AGED_S, AGED_BY_OWN * prompt.left_s))
        self._lines[self.tier_of(prompt)].add(prompt)

    def remove(self, prompt: P) -> None:
        self._aging.remove(prompt)
        self._lines[self.tier_of(prompt)].remove(prompt)

    def _seconds(self, prompt: P) -> float:
        """Of what is left to compute, alone."""
        if self.times is None:
            return 0.0
        try:
            return self.times.step_s(prefill_work(prompt.remaining, prompt.computed))
        except NotCovered:
            return 0.0

    # --- choosing -------------------------------------------------------------------------------

    def order(self, now_s: float) -> Iterator[P]:
        """All that wait; may be left at any point."""
        self._chosen_as_aged.clear()
        for prompt in self._aged(now_s):
            self._chosen_as_aged.add(prompt.arrival)
            yield prompt
        within = {t.name for t in self.qos.tiers if self._is_within_share(t, now_s)}
        for tier in sorted(self._by_priority, key=lambda tier: tier.name not in within):
            for prompt in self._lines[tier.name].order(now_s):
                if prompt.arrival not in self._chosen_as_aged:
                    yield prompt

    def _aged(self, now_s: float) -> Iterator[P]:
        left_s = AGED_SHARE * AGED_RECENT_S - self._spent_aged_s.at(_AGED, now_s)
        for aged_s, _, prompt in self._aging.entries:
            if aged_s > now_s or left_s <= 0:
                return
            left_s -= prompt.left_s
            yield prompt

    def _is_within_share(self, tier: QosTier, now_s: float) -> bool:
        return self._spent_s.at(tier.name, now_s) < tier.share * RECENT_S

    # --- afterwards -----------------------------------------------------------------------------

    def ran(self, taken: Iterable[tuple[P, int]], seconds: float, now_s: float) -> None:
        """A step took so long for so many tokens of each, which are computed now."""
        chunks = tuple(taken)
        tokens = sum(take for _, take in chunks)
        for prompt, take in chunks:
            share_s = seconds * take / tokens
            tier = self.tier_of(prompt)
            self._spent_s.spend(tier, share_s, now_s)
            self._lines[tier].served.spend(prompt.tenant, take, now_s)
            if prompt.arrival in self._chosen_as_aged:
                self._spent_aged_s.spend(_AGED, share_s, now_s)
            self._went_on(prompt, tier)

    def _went_on(self, prompt: P, tier: str) -> None:
        """It has less left."""
        if prompt in self._aging:
            self._lines[tier].remove(prompt)
            prompt.left_s = self._seconds(prompt)
            if prompt.remaining:
                self._lines[tier].add(prompt)

    def validate(self, waiting: Iterable[P]) -> None:
        """Each is in its tier's line once, and ages."""
        prompts = tuple(waiting)
        assert all(prompt in self._aging for prompt in prompts)
        assert len(self._aging.entries) == len(prompts), "one that is gone ages"
        for name, line in self._lines.items():
            line.validate(prompt for prompt in prompts if self.tier_of(prompt) == name)
