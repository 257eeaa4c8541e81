"""What a placement policy is, and what it chooses from. Pure.

A policy suggests; admission and the workers decide. It yields ways to serve a request, best first,
each decode worker at least once, and never goes through all pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.types import Incarnation
from router.core.policy.forecast import Forecast
from router.core.state.candidate import Candidate
from router.core.state.demand import Demand
from router.core.state.quarantine import NOTHING_AGAINST, Against, Objections, Pair, trusted
from router.core.state.worker_view import WorkerView


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerChoice:
    """The workers that could serve the request; `alone` are those decode workers that may prefill
    too. `least_against` speaks against every pair, also of those that were asked already."""

    prefills: Sequence[WorkerView]
    decodes: Sequence[WorkerView]
    alone: Sequence[WorkerView]
    objections: Objections
    forecast: Forecast
    workers: Mapping[Incarnation, WorkerView]
    least_against: int = 0

    @property
    def decoders(self) -> list[WorkerView]:
        return [*self.decodes, *self.alone]

    def sourced(self, demand: Demand, decode: WorkerView, prefill: WorkerView | None) -> Candidate:
        """With the prefix source that the worker that prefills could use."""
        source = demand.held.source(self.workers, prefill or decode)
        return Candidate(decode=decode, prefill=prefill, source=source)

    def against(self, prefill: WorkerView | None, decode: WorkerView) -> Against:
        if self.objections is trusted:
            return NOTHING_AGAINST
        if prefill is None:
            return self.objections(None)
        return self.objections(Pair(prefill.incarnation, decode.incarnation))

    def acceptable(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """A pair that failed is not asked because another one is full."""
        if self.objections is trusted:
            return iter(candidates)
        least = self.least_against
        return (one for one in candidates if self.against(one.prefill, one.decode)[0] <= least)

    def prefill_for(
        self, decode: WorkerView, ordered: Sequence[WorkerView]
    ) -> tuple[Against, WorkerView] | None:
        """Of the prefill workers, best first, the first with the least against the pair."""
        best: tuple[Against, WorkerView] | None = None
        for prefill in ordered:
            against = self.against(prefill, decode)
            if best is None or against < best[0]:
                best = (against, prefill)
            if against == (0, 0.0):
                break
        return best


class PlacementPolicy(Protocol):
    def candidates(
        self, demand: Demand, choice: WorkerChoice, now_s: float
    ) -> Iterable[Candidate]: ...


def least_against(
    prefills: Iterable[WorkerView], decodes: Sequence[WorkerView], objections: Objections
) -> int:
    """The least that speaks against any of their pairs; 0 without any."""
    least: int | None = None
    for prefill in prefills:
        for decode in decodes:
            against = objections(Pair(prefill.incarnation, decode.incarnation))[0]
            if against == 0:
                return 0
            least = against if least is None else min(least, against)
    return least or 0


def paired(
    choice: WorkerChoice,
    decoders: Iterable[WorkerView],
    prefills: Callable[[], Sequence[WorkerView]],
) -> Iterator[Candidate]:
    """Each of `decoders`, in order, with the best prefill worker; suspected pairs last."""
    suspected: list[tuple[Against, Candidate]] = []
    alone = {worker.incarnation for worker in choice.alone}
    for decode in decoders:
        if decode.incarnation in alone:
            yield Candidate(decode=decode, prefill=None)
            continue
        found = choice.prefill_for(decode, prefills())
        if found is None:
            continue
        candidate = Candidate(decode=decode, prefill=found[1])
        if found[0][0] == 0:
            yield candidate
        else:
            suspected.append((found[0], candidate))
    yield from (candidate for _, candidate in sorted(suspected, key=lambda one: one[0]))
