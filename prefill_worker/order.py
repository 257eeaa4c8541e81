"""In which order a prefill worker computes the prompts that wait. Pure.

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

from engine.latency import NotCovered, StepTimes, prefill_work
from kvrelay.qos import ONE_TIER, QosTier, QosTiers
from prefill_worker.decaying import Decaying
from prefill_worker.job import Job
from prefill_worker.line import Line, Sorted

RECENT_S = 10.0
AGED_SHARE = 0.1
AGED_RECENT_S = 2.0
"""Over so long: a prompt of a tier within its share waits for a tenth of it at most."""
AGED_S = 2.0
AGED_BY_OWN = 10.0
"""A prompt has aged when it waited for AGED_S, and for so many times what it takes itself."""

_AGED = ""


@dataclass(slots=True, kw_only=True)
class Order:
    """`times` are the worker's own, as corrected at the moment; None: nothing is known."""

    qos: QosTiers = ONE_TIER
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    times: StepTimes | None = None
    _lines: dict[str, Line] = field(default_factory=dict)  # tier |-> its prompts
    _tiers: dict[str, QosTier] = field(init=False)
    _by_priority: list[QosTier] = field(init=False)
    _aging: Sorted = field(default_factory=Sorted)
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

    def tier_of(self, job: Job) -> str:
        name = job.message.spec.qos_tier
        return name if name in self._tiers else self.qos.default

    # --- coming and going -----------------------------------------------------------------------

    def add(self, job: Job, now_s: float) -> None:
        job.arrival, self._arrivals = self._arrivals, self._arrivals + 1
        within_s = job.message.within_s
        job.deadline_s = None if within_s is None else now_s + within_s
        job.left_s = self._seconds(job)
        self._aging.add(job, now_s + max(AGED_S, AGED_BY_OWN * job.left_s))
        self._lines[self.tier_of(job)].add(job)

    def remove(self, job: Job) -> None:
        self._aging.remove(job)
        self._lines[self.tier_of(job)].remove(job)

    def _seconds(self, job: Job) -> float:
        """Of what is left to compute, alone."""
        if self.times is None:
            return 0.0
        try:
            return self.times.step_s(prefill_work(job.remaining, job.end(0)))
        except NotCovered:
            return 0.0

    # --- choosing -------------------------------------------------------------------------------

    def order(self, now_s: float) -> Iterator[Job]:
        """All that wait; may be left at any point."""
        self._chosen_as_aged.clear()
        for job in self._aged(now_s):
            self._chosen_as_aged.add(job.arrival)
            yield job
        within = {t.name for t in self.qos.tiers if self._is_within_share(t, now_s)}
        for tier in sorted(self._by_priority, key=lambda tier: tier.name not in within):
            for job in self._lines[tier.name].order(now_s):
                if job.arrival not in self._chosen_as_aged:
                    yield job

    def _aged(self, now_s: float) -> Iterator[Job]:
        left_s = AGED_SHARE * AGED_RECENT_S - self._spent_aged_s.at(_AGED, now_s)
        for aged_s, _, job in self._aging.entries:
            if aged_s > now_s or left_s <= 0:
                return
            left_s -= job.left_s
            yield job

    def _is_within_share(self, tier: QosTier, now_s: float) -> bool:
        return self._spent_s.at(tier.name, now_s) < tier.share * RECENT_S

    # --- afterwards -----------------------------------------------------------------------------

    def ran(self, taken: Iterable[tuple[Job, int]], seconds: float, now_s: float) -> None:
        """A step took so long for so many tokens of each, which are computed now."""
        chunks = tuple(taken)
        tokens = sum(take for _, take in chunks)
        for job, take in chunks:
            share_s = seconds * take / tokens
            tier = self.tier_of(job)
            self._spent_s.spend(tier, share_s, now_s)
            self._lines[tier].served.spend(job.tenant, take, now_s)
            if job.arrival in self._chosen_as_aged:
                self._spent_aged_s.spend(_AGED, share_s, now_s)
            self._went_on(job, tier)

    def _went_on(self, job: Job, tier: str) -> None:
        """It has less left."""
        if job in self._aging:
            self._lines[tier].remove(job)
            job.left_s = self._seconds(job)
            if job.remaining:
                self._lines[tier].add(job)

    def validate(self, waiting: Iterable[Job]) -> None:
        """Each is in its tier's line once, and ages."""
        jobs = tuple(waiting)
        assert all(job in self._aging for job in jobs)
        assert len(self._aging.entries) == len(jobs), "one that is gone ages"
        for name, line in self._lines.items():
            line.validate(job for job in jobs if self.tier_of(job) == name)
