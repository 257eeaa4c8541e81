"""Simulates fleets until they hold an SLO, or until their highest rate is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from cluster.config.schema import Config
from cluster.sim.planning.candidates import CandidateFleet, cluster_file, fits, grown
from cluster.sim.planning.estimate import PlanObjectives
from cluster.sim.profiles.capacity import PlannedModel
from cluster.sim.results import output
from cluster.sim.results.report import Report
from cluster.sim.simulation import Scale
from cluster.sim.trace import Outcome, TraceRequest

_MOST_TRIES = 12
_RATE_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What every fleet is tried on."""

    model: str
    facts: PlannedModel
    requests: Sequence[TraceRequest]
    rate_scale: float
    objectives: PlanObjectives
    stock: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """`holds`: the report's attainment reaches the objective's."""

    fleet: CandidateFleet
    report: Report
    rate_scale: float
    holds: bool


def settle_all(
    fleets: Sequence[CandidateFleet],
    settle: Callable[[CandidateFleet], Settled | None],
    processes: int,
) -> list[Settled]:
    """In parallel processes; in this one where there is just one."""
    if processes == 1:
        found = [settle(fleet) for fleet in fleets]
    else:
        with ProcessPoolExecutor(processes) as pool:
            found = list(pool.map(settle, fleets))
    return [one for one in found if one is not None]


def enough(task: Task, fleet: CandidateFleet) -> Settled | None:
    """Grown where it misses until it holds. None: it needs more devices than there are."""
    for _ in range(_MOST_TRIES):
        if not fits(fleet, task.stock):
            return None
        settled, outcomes = _try(task, fleet, task.rate_scale)
        if settled.holds:
            return settled
        fleet = grown(fleet, _bottleneck(fleet, outcomes, task.objectives))
    return None


def fastest_rate(task: Task, fleet: CandidateFleet) -> Settled | None:
    """At the highest rate that it holds, by halving. None: not at any that was tried."""
    best, low = None, 0.0
    high = 2 * task.rate_scale * fleet.most_rate_per_s / _rate_per_s(task)
    for _ in range(_RATE_STEPS):
        middle = (low + high) / 2
        settled, _ = _try(task, fleet, middle)
        if settled.holds:
            best, low = settled, middle
        else:
            high = middle
    return best


def _rate_per_s(task: Task) -> float:
    return task.rate_scale * len(task.requests) / (task.requests[-1].arrival_s or 1.0)


def _try(task: Task, fleet: CandidateFleet, rate_scale: float) -> tuple[Settled, Sequence[Outcome]]:
    raw = cluster_file(fleet, task.model, task.facts, task.objectives)
    config = Config.model_validate(raw, strict=False)
    result = output.simulate(config, task.requests, Scale(rate=rate_scale))
    settled = Settled(
        fleet=fleet,
        report=result.report,
        rate_scale=rate_scale,
        holds=result.report.attainment >= task.objectives.attainment,
    )
    return settled, result.outcomes


def _bottleneck(
    fleet: CandidateFleet, outcomes: Sequence[Outcome], objectives: PlanObjectives
) -> int:
    """The pool of the objective that more requests miss."""
    late = sum(one.ttft_s is None or one.ttft_s > objectives.ttft_s for one in outcomes)
    slow = sum((one.tpot_s or 0.0) > objectives.tpot_s for one in outcomes)
    return 0 if len(fleet.pools) == 1 or late >= slow else 1


def parallel_enough(task: Task, fleets: Sequence[CandidateFleet], processes: int) -> list[Settled]:
    """Those that hold, cheapest first."""
    found = settle_all(fleets, partial(enough, task), processes)
    return sorted(found, key=lambda one: one.fleet.price_per_hour)


def parallel_fastest(task: Task, fleets: Sequence[CandidateFleet], processes: int) -> list[Settled]:
    """Those that hold at some rate, fastest first."""
    found = settle_all(fleets, partial(fastest_rate, task), processes)
    return sorted(found, key=lambda one: -one.report.goodput_per_s)
