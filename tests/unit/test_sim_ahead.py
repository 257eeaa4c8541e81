"""Simulated devices that take a second step of prompts while the first one runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cluster.config.load import load_config
from cluster.config.overrides import Override
from cluster.core.worker.events import CoreEvent
from cluster.sim.device import SimDevice
from cluster.sim.machines.clock import Clock
from cluster.sim.profiles.load import HardwareProfile
from cluster.sim.simulation import ClusterSimulation, Scale, Simulated
from cluster.sim.trace import Answers, TraceRequest
from cluster.sim.worker import Hardware
from engine.core.correction import StepPace
from engine.core.step import RunStep, SequenceSlice, StepBatch, StepDone
from engine.core.step_times import LinearTimes, prefill_work
from kvpool.core.transfer.commands import LayersWritten
from kvrelay.types import RequestKey
from tests.unit.test_simulation import LINEAR, PLAIN, trace

TIMES = LinearTimes(prefill_token_s=0.01)


def step(number: int, tokens: int, marks: tuple[int, ...] = ()) -> RunStep:
    piece = SequenceSlice(
        key=RequestKey("0", 0),
        choice=0,
        token_ids=range(tokens),
        start=0,
        tables=(),
        prompt_tokens=1000,
    )
    batch = StepBatch(slices=(piece,))
    return RunStep(batch=batch, layer_marks=frozenset(marks), number=number)


class Told:
    """# what a device of four layers told, and when"""

    def __init__(self, stages: int) -> None:
        self.clock = Clock()
        self.told: list[tuple[float, CoreEvent]] = []
        self.device = SimDevice(
            self.clock, TIMES, Answers([]), layers=4, post=self._hear, stages=stages
        )

    def _hear(self, events: Sequence[CoreEvent]) -> None:
        self.told += [(self.clock.now_s, event) for event in events]

    def ends(self) -> list[tuple[float, float]]:
        """When each step ended, and how long it says that it took."""
        done = [(at_s, event) for at_s, event in self.told if isinstance(event, StepDone)]
        return [(round(at_s, 9), round(event.seconds, 9)) for at_s, event in done]

    def marks(self) -> list[tuple[int, int, float]]:
        """# step, layer, when"""
        found = [(at_s, event) for at_s, event in self.told if isinstance(event, LayersWritten)]
        return sorted((event.step, event.layer, round(at_s, 9)) for at_s, event in found)


def test_the_second_step_begins_when_the_first_has_ended() -> None:
    one = Told(stages=1)
    one.device.submit(step(0, 100, (1,)))
    one.clock.after(0.25, lambda _: one.device.submit(step(1, 50, (0, 1))))
    one.clock.run()
    assert one.ends() == [(1.0, 1.0), (1.5, 0.5)]
    assert one.marks() == [(0, 1, 0.5), (1, 0, 1.125), (1, 1, 1.25)]
    assert one.device.prefill_busy_s == pytest.approx(1.5)


def test_the_second_step_begins_in_a_pipeline_when_the_first_has_left_its_first_stage() -> None:
    one = Told(stages=2)
    one.device.submit(step(0, 100, (1, 2)))
    one.device.submit(step(1, 100, (0, 2)))
    one.clock.run()
    assert one.ends() == [(1.0, 1.0), (1.5, 0.5)]
    assert one.marks() == [(0, 1, 0.5), (0, 2, 0.75), (1, 0, 0.75), (1, 2, 1.25)]


def test_a_short_step_does_not_overtake_a_long_one_and_a_stage_waits_for_the_one_before() -> None:
    one = Told(stages=2)
    one.device.submit(step(0, 100))
    one.device.submit(step(1, 20))
    one.clock.run()
    assert one.ends() == [(1.0, 1.0), (1.1, 0.1)]
    other = Told(stages=2)
    other.device.submit(step(0, 20))
    other.device.submit(step(1, 100))
    other.clock.run()
    assert other.ends() == [(0.2, 0.2), (1.1, 0.9)]


def test_a_step_alone_takes_its_whole_time_in_any_pipeline() -> None:
    for stages in (1, 2, 3):
        one = Told(stages)
        one.device.submit(step(0, 100))
        one.clock.run()
        one.device.submit(step(1, 100))
        one.clock.run()
        assert one.ends() == [(1.0, 1.0), (2.0, 1.0)]


# --- what is predicted --------------------------------------------------------------------------


def test_in_a_full_pipeline_steps_seem_to_take_their_share_of_the_time() -> None:
    """The gap between two ends is what is learnt: right for a queue's length in time. Alone again,
    a step takes its whole time, and that is learnt as well."""
    pace, clock = StepPace(TIMES), 0.0
    work = prefill_work(100)
    for number in range(60):
        pace.begun(work, clock)
        clock += 0.5 if number else 1.0
        pace.ended(clock)
    assert pace.prefill.factor == pytest.approx(0.5, rel=0.02)
    for _ in range(60):
        pace.idle()
        clock += 3.0
        pace.begun(work, clock)
        clock += 1.0
        pace.ended(clock)
    assert pace.prefill.factor == pytest.approx(1.0, rel=0.05)


# --- whole clusters -----------------------------------------------------------------------------


class Ahead(ClusterSimulation):
    """Its prefill workers launch chunks ahead."""

    stages = 1

    def _hardware(self, index: int) -> tuple[HardwareProfile, Hardware]:
        profile, hardware = super()._hardware(index)
        return profile, replace(hardware, prompt_steps=2, stages=self.stages)


class Pipeline(Ahead):
    stages = 2


def run(kind: type[ClusterSimulation], requests: list[TraceRequest], *settings: str) -> Simulated:
    config = load_config(None, map(Override.parse, (*PLAIN, *settings)))
    return kind(config, requests, Scale()).run()


def first_tokens_s(one: Simulated) -> list[float]:
    found = [outcome.ttft_s for outcome in one.outcomes]
    assert all(outcome.done for outcome in one.outcomes)
    return [seconds for seconds in found if seconds is not None]


@pytest.mark.parametrize("kind", [Ahead, Pipeline])
@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("transfer.handoff=pull",),
        ("simulation.block_size=16",),
        ("simulation.blocks=60", "simulation.retries=1000"),
        ("simulation.noise.sigma=0.3",),
        ("simulation.service.worker_turn=1ms",),
        ("simulation.failures=[{worker: prefill-0, at: 2s, back_after: 3s}]",),
        ("workers.0.role=both", "workers.1.role=both"),
    ],
)
def test_every_request_gets_its_tokens_and_nothing_stays_held(
    kind: type[ClusterSimulation], settings: tuple[str, ...]
) -> None:
    """The simulation itself asserts the conservation laws at its end."""
    one = run(kind, trace(120), *settings)
    assert all(o.done and o.tokens == o.request.output_tokens for o in one.outcomes)


LONG = (
    f"simulation.profile={json.dumps(LINEAR).replace('2e-05', '0.00002')}",
    "workers.0.replicas=1",
    "workers.1.replicas=1",
    "scheduler.prefill_chunk_tokens=1024",
    "simulation.blocks=4000",
)


def long_prompts(count: int, tokens: int = 16 * 1024) -> list[TraceRequest]:
    return [
        TraceRequest(arrival_s=0.001 * n, input_tokens=tokens, output_tokens=1)
        for n in range(count)
    ]


def test_two_stages_compute_long_prompts_in_little_more_than_half_the_time() -> None:
    plain, device, pipeline = (
        max(first_tokens_s(run(kind, long_prompts(8), *LONG)))
        for kind in (ClusterSimulation, Ahead, Pipeline)
    )
    assert device == pytest.approx(plain, rel=1e-3), "one device is never idle in the simulator"
    assert pipeline / plain == pytest.approx((8 * 16 + 1) / (2 * 8 * 16), rel=0.01)
    of_file = run(ClusterSimulation, long_prompts(8), *LONG, "workers.0.parallel.pipeline=2")
    assert max(first_tokens_s(of_file)) == pipeline
    (alone,) = first_tokens_s(run(ClusterSimulation, long_prompts(1, 1024), *LONG))
    (staged,) = first_tokens_s(run(Pipeline, long_prompts(1, 1024), *LONG))
    assert staged == pytest.approx(alone, rel=1e-6), "one chunk gains nothing"
