"""The prompts of one tier that wait, in order. Pure.

Earliest deadline first of those that can still be met. Then all others: of the tenant that was
served least lately by its weight, the one with the least left to compute.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Generic

from engine.prompts.decaying import Decaying
from engine.prompts.prompt import P
from kvrelay.types import RequestKey


@dataclass(slots=True)
class Sorted(Generic[P]):
    """Prompts by a number; equal ones by arrival."""

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
        """Removing what isn't there is fine."""
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
    _deadlines: Sorted[P] = field(default_factory=Sorted)
    _latest_starts: Sorted[P] = field(default_factory=Sorted)
    _tenants: dict[str, Sorted[P]] = field(default_factory=dict)

    def add(self, prompt: P) -> None:
        if prompt.deadline_s is None:
            self._add_to_tenant(prompt)
            return
        self._deadlines.add(prompt, prompt.deadline_s)
        self._latest_starts.add(prompt, prompt.deadline_s - prompt.left_s)

    def _add_to_tenant(self, prompt: P) -> None:
        self._tenants.setdefault(prompt.tenant, Sorted()).add(prompt, prompt.remaining)

    def remove(self, prompt: P) -> None:
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
        yield from self._deadlines
        yield from self._fairly(now_s)

    def _fairly(self, now_s: float) -> Iterator[P]:
        """As if each were served before the next is chosen."""
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
        """Each is here once."""
        here = [*self._deadlines, *(prompt for line in self._tenants.values() for prompt in line)]
        assert len({*map(id, here)}) == len(here), "a prompt is here twice"
        assert {*map(id, here)} == {*map(id, prompts)}, "a prompt ran away"
        assert len(self._latest_starts.entries) == len(self._deadlines.entries)
