"""How much work clients have asked for: what the number of workers and their roles follow. Pure.

Admission keeps queues and latencies low by refusing, so they say nothing about need. What is
offered does: the work of admitted and of refused requests. A client that was refused and comes
back when it was told to is the same work, counted once.

Which prompts the workers of each pool have computed: the share of a pool. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from engine.core.step_times import pairs_of
from router.core.load.histograms import Histograms
from router.core.load.offered import OfferedWork
from router.core.state.demand import Demand
from router.core.state.worker_view import WorkerView

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0, inf)


@dataclass(slots=True)
class OfferedLoad:
    """`tiers`: # tier |-> its work. `shares` of the objectives that requests were predicted to
    take, were they admitted."""

    tiers: dict[str, OfferedWork] = field(default_factory=dict)
    shares: Histograms = field(default_factory=lambda: Histograms(SHARES))

    def add(self, demand: Demand, cached: int) -> None:
        """`cached`: prompt tokens that some worker has."""
        work = self.tiers.get(demand.tier.name)
        if work is None:
            work = self.tiers[demand.tier.name] = OfferedWork()
        new = max(1, demand.prompt_tokens - cached)
        work.requests += 1
        work.prompt_tokens += new
        work.prompt_squares += new * new
        work.prompt_pairs += pairs_of(new, cached)
        if demand.decodes:
            out = demand.output_tokens * demand.choices
            work.output_tokens += out
            work.context_tokens += out * demand.mean_tokens
        ttft_s, tpot_s = demand.objectives.ttft_s, demand.objectives.tpot_s
        if ttft_s is not None:
            work.ttft_s += ttft_s
            work.with_ttft += 1
        if tpot_s is not None:
            work.tpot_s += tpot_s
            work.with_tpot += 1

    def note(self, shares: Mapping[str, float]) -> None:
        """`shares`: # ttft, tpot |-> predicted over asked for"""
        for kind, share in shares.items():
            self.shares.count(kind, share)

    @property
    def total(self) -> OfferedWork:
        return sum(self.tiers.values(), OfferedWork())


def most_cached(demand: Demand, worker: WorkerView | None) -> int:
    """Tokens of the prompt that any worker or pool node has, under the names of `worker`."""
    if worker is None:
        return 0
    return max(demand.held.blocks(worker).values(), default=0) * worker.hello.block_size


@dataclass(slots=True)
class PrefilledWork:
    """Prompts that were begun, and their tokens that were not cached. A prompt that is begun anew
    after its worker has died counts again."""

    prompts: int = 0
    tokens: int = 0


class PrefilledByPool(dict[str, PrefilledWork]):
    """# pool |-> what its workers have begun. A pool stays when its last worker leaves."""

    def __missing__(self, pool: str) -> PrefilledWork:
        work = self[pool] = PrefilledWork()
        return work

    def join(self, pool: str) -> None:
        self.setdefault(pool, PrefilledWork())

    def began(self, pool: str, tokens: int) -> None:
        work = self[pool]
        work.prompts += 1
        work.tokens += tokens
