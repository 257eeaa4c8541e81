"""The highest rate that a simulated cluster serves within its objectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from cluster.config.schema import Config
from cluster.sim.results import output
from cluster.sim.simulation import Scale
from cluster.sim.trace import Outcome, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """A request is served well when both hold; `attainment` is the share that must be."""

    ttft_s: float
    tpot_s: float
    attainment: float = 0.9

    def met_by(self, outcome: Outcome) -> bool:
        """One of a single token has no gaps."""
        if not outcome.done or outcome.ttft_s is None:
            return False
        return outcome.ttft_s <= self.ttft_s and (outcome.tpot_s or 0.0) <= self.tpot_s


def poisson(
    count: int, rate_per_s: float, input_tokens: int, output_tokens: int, seed: int
) -> list[TraceRequest]:
    """Requests of one size, no two with a common prefix, the first at 0."""
    rng, now_s, requests = Random(seed), 0.0, []
    for _ in range(count):
        requests.append(
            TraceRequest(arrival_s=now_s, input_tokens=input_tokens, output_tokens=output_tokens)
        )
        now_s += rng.expovariate(rate_per_s)
    return requests


def simulate(config: Mapping[str, object], requests: Sequence[TraceRequest]) -> Sequence[Outcome]:
    return output.simulate(Config.model_validate(config, strict=False), requests, Scale()).outcomes


def attainment(outcomes: Sequence[Outcome], objectives: Objectives) -> float:
    """Over all offered requests."""
    return sum(map(objectives.met_by, outcomes)) / len(outcomes)


def highest_rate(holds: Callable[[float], bool], start: float, within: float = 0.02) -> float:
    """The rate up to which `holds` is true, to a share of itself; 0 where not even a 64th of
    `start` holds."""
    low, high = 0.0, start
    while holds(high):
        low, high = high, 2 * high
    while high - low > within * high:
        middle = (low + high) / 2
        if middle < start / 64:
            return 0.0
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
