"""Roles follow the work in the simulator: workers flip, and nothing is lost or left held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.elastic.loads import H200_70B, HOPELESS
from bench.elastic.published import Predictions, as_arrow, as_xllm, fewest_decode_workers
from bench.elastic.study import MINUTE, Cell, calm_s, config_of, policy_of
from cluster.config.schema import Config
from cluster.core.elastic.fleet import Fleet
from cluster.sim.simulation import ClusterSimulation
from cluster.sim.trace import Outcome, TraceRequest
from engine.core.step_times import LinearTimes
from kvrelay.types import Incarnation, Role


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


def test_three_of_ten_prompts_are_hopeless_even_on_an_idle_worker_and_no_others() -> None:
    cell = Cell(load="hopeless", way="roles", prefill=8, rate=10.0, minutes=2.0)
    simulation = ClusterSimulation(config_of(cell, H200_70B), cell.requests(), cell.scale())
    times = LinearTimes.of(simulation.fleet.workers[Incarnation("worker-0")].hardware.told)
    late = [times.prompt_s(one.input_tokens, 0, 2048) > 2.0 for one in cell.requests()]
    assert 0.25 < sum(late) / len(late) < 0.35
    assert sum(late) == sum(one.input_tokens == HOPELESS for one in cell.requests())


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


def seen(**changes: Any) -> Predictions:
    calm = Predictions(first_token_late=False, decode_full=False, prefill_s=0.5, decode_workers=4)
    return replace(calm, **changes)


FLEET = Fleet(prefill=4, decode=4, running=100)


def test_xllm_gives_a_worker_that_would_be_empty_to_prefill_and_takes_one_that_it_can_spare() -> (
    None
):
    assert as_xllm(seen(), FLEET, 2.0) == 0
    assert as_xllm(seen(first_token_late=True), FLEET, 2.0) == 0  # all its decode workers run
    assert as_xllm(seen(decode_workers=3), FLEET, 2.0) == 1
    assert as_xllm(seen(decode_full=True), FLEET, 2.0) == -1
    assert as_xllm(seen(decode_full=True, prefill_s=1.6), FLEET, 2.0) == 0  # 3/4 of two seconds
    fewer = replace(FLEET, decode=3)
    assert as_xllm(seen(decode_full=True, prefill_s=1.6), fewer, 2.0) == -1


def test_arrow_gives_a_worker_to_prefill_when_first_tokens_are_late_and_decode_can_spare_it() -> (
    None
):
    assert as_arrow(seen(decode_workers=3), FLEET, 2.0) == 0
    assert as_arrow(seen(decode_workers=3, first_token_late=True), FLEET, 2.0) == 1
    assert as_arrow(seen(decode_workers=4, first_token_late=True), FLEET, 2.0) == 0
    assert as_arrow(seen(decode_full=True, first_token_late=True), FLEET, 2.0) == -1


@pytest.mark.parametrize("way", ["xllm", "arrow"])
def test_published_rules_flip_workers_for_long_prompts(way: str) -> None:
    """Four of sixteen workers prefill: too few."""
    cell = Cell(load="swing", way=way, prefill=4, rate=12.0, minutes=0.5)
    simulation = ClusterSimulation(config_of(cell, H200_70B), cell.requests(), cell.scale())
    simulation.elastic.policy = policy_of(cell, simulation)
    flips = simulation.run().flips
    assert flips
    assert flips[0].role is Role.PREFILL


def test_the_fewest_decode_workers_are_those_whose_blocks_hold_what_runs() -> None:
    """Two of three have nothing: one is enough, and with no time for a step not even all are."""
    cell = Cell(load="swing", way="static", prefill=2, workers=5, rate=1.0, minutes=0.1)
    simulation = ClusterSimulation(config_of(cell, H200_70B), cell.requests(), cell.scale())
    decode = [w for w in simulation.fleet.workers.values() if w.core.role is Role.DECODE]
    assert fewest_decode_workers(decode, 0.05) == 1
    assert fewest_decode_workers(decode, 0.0) == 4
