"""The order in which waiting prompts are computed. Pure.

It is decided anew for each step, so a tier gets its lent share back with the next one:

    1. prompts that waited too long, within AGED_SHARE of the time
    2. tiers within their share of recent prefill time, by priority
    3. the other tiers, by priority

The first kind always gets its share, so no prompt starves: it is computed after those that aged
before it, at worst in AGED_SHARE of the time.

Inside a tier (`Line`), those that are resumed go first: their clients wait for the next token. Then
come prompts that can still meet their deadlines, by deadline, and then all others: of the tenant
that was served least of late, by its weight, the prompt with the least left to compute.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from math import exp
from typing import Generic, Protocol, TypeVar

from engine.core.step_times import NotCovered, StepTimes, prefill_work
from kvrelay.qos import ONE_TIER, QosTier, QosTiers
from kvrelay.types import RequestKey


class OrderedPrompt(Protocol):
    """It was the `arrival`-th to come. Its first token is due at `deadline_s`, and alone it needs
    `left_s` more seconds; the order sets both."""

    arrival: int
    deadline_s: float | None
    left_s: float

    @property
    def key(self) -> RequestKey: ...

    @property
    def tenant(self) -> str: ...

    @property
    def qos_tier(self) -> str: ...

    @property
    def is_resumed(self) -> bool:
        """Its client has tokens of it."""

    @property
    def within_s(self) -> float | None:
        """Its first token is due this long after its arrival."""

    @property
    def computed(self) -> int:
        """Tokens whose KV is there."""

    @property
    def remaining(self) -> int:
        """Tokens still to be computed."""


P = TypeVar("P", bound=OrderedPrompt)


_MOST_NAMES = 4096


@dataclass(slots=True, kw_only=True)
class Decaying:
    """Sums by name. An amount spent `span_s` ago counts 1/e of one spent now."""

    span_s: float
    _spent: dict[str, tuple[float, float]] = field(default_factory=dict)  # name |-> amount, as of

    def at(self, name: str, now_s: float) -> float:
        amount, since_s = self._spent.get(name, (0.0, now_s))
        return amount * exp((since_s - now_s) / self.span_s)

    def spend(self, name: str, amount: float, now_s: float) -> None:
        self._spent[name] = (self.at(name, now_s) + amount, now_s)
        if len(self._spent) > _MOST_NAMES:
            self._forget_small(now_s)

    def _forget_small(self, now_s: float) -> None:
        """Forgets the half that spent least."""
        by_amount = sorted(self._spent, key=lambda name: self.at(name, now_s))
        for name in by_amount[: _MOST_NAMES // 2]:
            del self._spent[name]


@dataclass(slots=True)
class Sorted(Generic[P]):
    """Prompts ordered by a number; equal ones by arrival."""

    entries: list[tuple[float, int, P]] = field(default_factory=list)
    _by_key: dict[RequestKey, tuple[float, int, P]] = field(default_factory=dict)

    def __contains__(self, prompt: P) -> bool:
        return prompt.key in self._by_key

    def __iter__(self) -> Iterator[P]:
        return (prompt for _, _, prompt in self.entries)

    def add(self, prompt: P, value: float) -> None:
        entry = self._by_key[prompt.key] = (value, prompt.arrival, prompt)
        insort(self.entries, entry)

    def remove(self, prompt: P) -> None:
        """Does nothing for an unknown prompt."""
        entry = self._by_key.pop(prompt.key, None)
        if entry is not None:
            del self.entries[bisect_left(self.entries, entry)]

    def first_below(self, value: float) -> P | None:
        return self.entries[0][2] if self.entries and self.entries[0][0] < value else None


@dataclass(slots=True, kw_only=True)
class Line(Generic[P]):
    """`served` counts tokens by tenant."""

    weights: Mapping[str, float]
    served: Decaying
    _resumed: Sorted[P] = field(default_factory=Sorted)  # in order of arrival
    _deadlines: Sorted[P] = field(default_factory=Sorted)
    _latest_starts: Sorted[P] = field(default_factory=Sorted)
    _tenants: dict[str, Sorted[P]] = field(default_factory=dict)

    def add(self, prompt: P) -> None:
        if prompt.is_resumed:
            self._resumed.add(prompt, 0.0)
        elif prompt.deadline_s is None:
            self._add_to_tenant(prompt)
        else:
            self._deadlines.add(prompt, prompt.deadline_s)
            self._latest_starts.add(prompt, prompt.deadline_s - prompt.left_s)

    def _add_to_tenant(self, prompt: P) -> None:
        self._tenants.setdefault(prompt.tenant, Sorted()).add(prompt, prompt.remaining)

    def remove(self, prompt: P) -> None:
        if prompt.is_resumed:
            self._resumed.remove(prompt)
            return
        self._deadlines.remove(prompt)
        self._latest_starts.remove(prompt)
        prompts = self._tenants.get(prompt.tenant)
        if prompts is not None:
            prompts.remove(prompt)
            if not prompts.entries:
                del self._tenants[prompt.tenant]

    def order(self, now_s: float) -> Iterator[P]:
        while (late := self._latest_starts.first_below(now_s)) is not None:
            self._deadlines.remove(late)
            self._latest_starts.remove(late)
            self._add_to_tenant(late)
        if self._resumed.entries:
            yield from self._resumed
        yield from self._deadlines
        yield from self._fairly(now_s)

    def _fairly(self, now_s: float) -> Iterator[P]:
        """Each next prompt is chosen as if those before were served already."""
        turns = [
            (self.served.at(tenant, now_s) / self._weight(tenant), tenant, 0)
            for tenant in self._tenants
        ]
        heapify(turns)
        while turns:
            served, tenant, nth = turns[0]
            prompts = self._tenants[tenant].entries
            prompt = prompts[nth][2]
            yield prompt
            if nth + 1 == len(prompts):
                heappop(turns)
            else:
                more = prompt.remaining / self._weight(tenant)
                heapreplace(turns, (served + more, tenant, nth + 1))

    def _weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)

    def validate(self, prompts: Iterable[P]) -> None:
        """Each prompt is here once."""
        lines = (self._resumed, self._deadlines, *self._tenants.values())
        here = [prompt for line in lines for prompt in line]
        assert len({*map(id, here)}) == len(here), "a prompt is here twice"
        assert {*map(id, here)} == {*map(id, prompts)}, "a prompt ran away"
        assert len(self._latest_starts.entries) == len(self._deadlines.entries)


RECENT_S = 10.0
AGED_SHARE = 0.1
AGED_RECENT_S = 2.0
"""Over this time, a prompt of a tier within its share waits for at most a tenth of it."""
AGED_S = 2.0
AGED_BY_OWN = 10.0
"""A prompt has aged after AGED_S, and after this many times its own duration."""

_AGED = ""


@dataclass(slots=True, kw_only=True)
class Order(Generic[P]):
    """`times` are the worker's own, with the current correction; None: nothing is known."""

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
        """Time of its remaining tokens, alone."""
        if self.times is None:
            return 0.0
        try:
            return self.times.step_s(prefill_work(prompt.remaining, prompt.computed))
        except NotCovered:
            return 0.0

    # --- choosing -------------------------------------------------------------------------------

    def order(self, now_s: float) -> Iterator[P]:
        """All waiting prompts; the caller may stop at any point."""
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
        """A step took this long; the tokens of each prompt are computed now."""
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
        """Each prompt is in its tier's line once, and ages."""
        prompts = tuple(waiting)
        assert all(prompt in self._aging for prompt in prompts)
        assert len(self._aging.entries) == len(prompts), "one that is gone ages"
        for name, line in self._lines.items():
            line.validate(prompt for prompt in prompts if self.tier_of(prompt) == name)
