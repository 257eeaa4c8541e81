"""How much work clients have asked for: what the number of workers and their roles follow. Pure.

Admission keeps queues and latencies low by refusing, so they say nothing about need. What is
offered does: the work of admitted and of refused requests. A client that was refused and comes
back is the same work, counted once (`router.core.promises.returning`). What no worker could serve
in time, were it alone there, is counted apart: no number of workers would help it.

Which prompts the workers of each pool have computed: the share of a pool. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    """`tiers`: # tier |-> its work. `hopeless`: # tier |-> requests that are no part of it, since
    no worker could keep what they ask for. `shares` of the objectives that requests were predicted
    to take, were they admitted."""

    tiers: dict[str, OfferedWork] = field(default_factory=dict)
    hopeless: Counter[str] = field(default_factory=Counter)
    shares: Histograms = field(default_factory=lambda: Histograms(SHARES))

    def add(self, demand: Demand, cached: int, shares: Mapping[str, float]) -> None:
        """`cached`: prompt tokens that some worker has. `shares`: # ttft, tpot |-> predicted over
        asked for"""
        self._note(shares)
        work = self.add_prompt(demand, cached)
        work.requests += 1
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

    def add_prompt(self, demand: Demand, cached: int) -> OfferedWork:
        """The part of a request that has come; the request comes after all of them."""
        work = self.tiers.get(demand.tier.name)
        if work is None:
            work = self.tiers[demand.tier.name] = OfferedWork()
        new = max(1, demand.prompt_tokens - cached)
        work.prompt_tokens += new
        work.prompt_squares += new * new
        work.prompt_pairs += pairs_of(new, cached)
        return work

    def add_hopeless(self, demand: Demand, shares: Mapping[str, float]) -> None:
        self._note(shares)
        self.hopeless[demand.tier.name] += 1

    def _note(self, shares: Mapping[str, float]) -> None:
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


def could_be_kept(
    demand: Demand,
    cached: int,
    prefills: Sequence[WorkerView],
    decodes: Sequence[WorkerView],
    overhead_s: float,
) -> bool:
    """Whether some worker of each role keeps what it asks for when it is alone there, by what step
    times say. Where a role has no worker, nobody can tell: it may."""
    asked, decodes = demand.objectives, decodes if demand.decodes else ()

    def prompt_s(worker: WorkerView) -> float:
        return overhead_s + worker.prompt_s(demand.prompt_tokens, cached)

    def step_s(worker: WorkerView) -> float:
        return worker.decode_s(demand.choices, demand.kv_tokens)

    in_time = _some_within(map(prompt_s, prefills), asked.ttft_s, not prefills)
    in_time = in_time and _some_within(map(step_s, decodes), asked.tpot_s, not decodes)
    if not in_time or asked.deadline_s is None:
        return in_time
    soonest_s = min(map(prompt_s, prefills), default=0.0)
    decodes_s = (demand.output_tokens - 1) * min(map(step_s, decodes), default=0.0)
    return soonest_s + decodes_s <= asked.deadline_s


def _some_within(times: Iterable[float], most_s: float | None, nobody: bool) -> bool:
    return most_s is None or nobody or any(seconds <= most_s for seconds in times)


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
