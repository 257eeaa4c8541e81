"""The prompts of one tier that wait at a prefill worker, in order. Pure.

Earliest deadline first of those that can still be met. Then all others: of the tenant that was
served least lately by its weight, the one with the least left to compute.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from kvrelay.types import RequestKey
from prefill_worker.decaying import Decaying
from prefill_worker.job import Job

Entry = tuple[float, int, Job]
"""What it is ordered by, its arrival, itself."""


@dataclass(slots=True)
class Sorted:
    """Jobs by a number; equal ones by arrival."""

    entries: list[Entry] = field(default_factory=list)
    _by_key: dict[RequestKey, Entry] = field(default_factory=dict)

    def __contains__(self, job: Job) -> bool:
        return job.key in self._by_key

    def __iter__(self) -> Iterator[Job]:
        return (job for _, _, job in self.entries)

    def add(self, job: Job, value: float) -> None:
        entry = self._by_key[job.key] = (value, job.arrival, job)
        insort(self.entries, entry)

    def remove(self, job: Job) -> None:
        """Removing what isn't there is fine."""
        entry = self._by_key.pop(job.key, None)
        if entry is not None:
            del self.entries[bisect_left(self.entries, entry)]

    def first_below(self, value: float) -> Job | None:
        return self.entries[0][2] if self.entries and self.entries[0][0] < value else None


@dataclass(slots=True, kw_only=True)
class Line:
    """`served` counts tokens by tenant."""

    weights: Mapping[str, float]
    served: Decaying
    _deadlines: Sorted = field(default_factory=Sorted)
    _latest_starts: Sorted = field(default_factory=Sorted)
    _tenants: dict[str, Sorted] = field(default_factory=dict)

    def add(self, job: Job) -> None:
        if job.deadline_s is None:
            self._add_to_tenant(job)
            return
        self._deadlines.add(job, job.deadline_s)
        self._latest_starts.add(job, job.deadline_s - job.left_s)

    def _add_to_tenant(self, job: Job) -> None:
        self._tenants.setdefault(job.tenant, Sorted()).add(job, job.remaining)

    def remove(self, job: Job) -> None:
        self._deadlines.remove(job)
        self._latest_starts.remove(job)
        jobs = self._tenants.get(job.tenant)
        if jobs is not None:
            jobs.remove(job)
            if not jobs.entries:
                del self._tenants[job.tenant]

    def order(self, now_s: float) -> Iterator[Job]:
        while (late := self._latest_starts.first_below(now_s)) is not None:
            self._deadlines.remove(late)
            self._latest_starts.remove(late)
            self._add_to_tenant(late)
        yield from self._deadlines
        yield from self._fairly(now_s)

    def _fairly(self, now_s: float) -> Iterator[Job]:
        """As if each were served before the next is chosen."""
        turns = [
            (self.served.at(tenant, now_s) / self._weight(tenant), tenant, 0)
            for tenant in self._tenants
        ]
        heapify(turns)
        while turns:
            served, tenant, nth = turns[0]
            jobs = self._tenants[tenant].entries
            job = jobs[nth][2]
            yield job
            if nth + 1 == len(jobs):
                heappop(turns)
            else:
                more = job.remaining / self._weight(tenant)
                heapreplace(turns, (served + more, tenant, nth + 1))

    def _weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)

    def validate(self, jobs: Iterable[Job]) -> None:
        """Each is here once."""
        here = [*self._deadlines, *(job for line in self._tenants.values() for job in line)]
        assert len({*map(id, here)}) == len(here), "a prompt is here twice"
        assert {*map(id, here)} == {*map(id, jobs)}, "a prompt ran away"
        assert len(self._latest_starts.entries) == len(self._deadlines.entries)
