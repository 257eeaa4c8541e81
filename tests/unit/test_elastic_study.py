"""Roles follow the work in the simulator: workers flip, and nothing is lost or left held."""

from __future__ import annotations

from bench.elastic.loads import H200_70B
from bench.elastic.study import Cell, config_of
from cluster.config.schema import Config
from cluster.sim.simulation import ClusterSimulation
from kvrelay.types import Role


def config(cell: Cell, *pools: tuple[str, int]) -> Config:
    file = config_of(cell, H200_70B).model_dump(mode="json")
    file["workers"] = [{"role": role, "replicas": count} for role, count in pools]
    return Config.model_validate(file, strict=False)


def test_workers_of_pools_that_take_either_role_follow_the_work_and_no_others() -> None:
    """Long prompts, and seven of sixteen workers that prefill: too few."""
    cell = Cell(load="swing", way="roles", prefill=8, rate=20.0, minutes=0.5)
    simulation = ClusterSimulation(
        config(cell, ("decode", 3), ("auto", 13)), cell.requests(), cell.scale()
    )
    flips = simulation.run().flips
    assert len(flips) >= 2
    assert flips[0].role is Role.PREFILL
    assert {flip.worker.partition("-")[0] for flip in flips} == {"worker"}
