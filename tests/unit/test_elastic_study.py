"""Roles follow the work in the simulator: workers flip, and nothing is lost or left held."""

from __future__ import annotations

from bench.elastic.loads import H200_70B
from bench.elastic.study import MINUTE, Cell, calm_s, config_of
from cluster.config.schema import Config
from cluster.sim.simulation import ClusterSimulation
from cluster.sim.trace import Outcome, TraceRequest
from kvrelay.types import Role


def config(cell: Cell, *pools: tuple[str, int]) -> Config:
    file = config_of(cell, H200_70B).model_dump(mode="json")
    file["workers"] = [{"role": role, "replicas": count} for role, count in pools]
    return Config.model_validate(file, strict=False)


def test_workers_of_pools_that_take_either_role_follow_the_work_and_no_others() -> None:
    """Long prompts, and five of sixteen workers that prefill: too few."""
    cell = Cell(load="swing", way="roles", prefill=8, rate=20.0, minutes=0.5)
    simulation = ClusterSimulation(
        config(cell, ("decode", 7), ("auto", 9)), cell.requests(), cell.scale()
    )
    flips = simulation.run().flips
    assert len(flips) >= 2
    assert flips[0].role is Role.PREFILL
    assert {flip.worker.partition("-")[0] for flip in flips} == {"worker"}


def outcome(arrival_s: float, *, refused: bool) -> Outcome:
    request = TraceRequest(arrival_s=arrival_s, input_tokens=1, output_tokens=1)
    return Outcome(request=request, refused="full" if refused else "")


def test_a_burst_is_no_minute_of_refusals() -> None:
    """Ten requests a second: half of them refused at first, and six of a hundred much later."""
    outcomes = [
        outcome(n / 10, refused=(n < 500 and n % 2 == 0) or 1200 <= n < 1206) for n in range(2000)
    ]
    assert calm_s(outcomes, MINUTE) == 50.0
    assert calm_s(outcomes, 1) == 130.0
    assert calm_s([outcome(1.0, refused=False)], MINUTE) == 0.0
