"""Runs of decode steps take as long as the steps do one by one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cluster.sim.device import run_s, steps_begun
from engine.core.step_times import StepWork, decode_work


@dataclass(frozen=True)
class Quadratic:
    def step_s(self, work: StepWork) -> float:
        return (
            0.005 + 1e-4 * work.decode_sequences + 1e-7 * work.kv_tokens - 1e-13 * work.kv_tokens**2
        )


TIMES = Quadratic()


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 17, 64])
@pytest.mark.parametrize("sequences", [1, 2, 7])
def test_a_run_is_the_sum_of_its_steps(steps: int, sequences: int) -> None:
    single = sum(TIMES.step_s(decode_work(sequences, 900 + sequences * i)) for i in range(steps))
    assert run_s(TIMES, sequences, 900, steps) == pytest.approx(single, rel=1e-5)


def test_a_cut_falls_on_the_end_of_the_step_that_runs() -> None:
    ends = [run_s(TIMES, 3, 900, steps) for steps in range(1, 21)]
    for begun, end_s in enumerate(ends, 1):
        assert steps_begun(TIMES, 3, 900, 20, end_s - 1e-6) == begun
        assert steps_begun(TIMES, 3, 900, 20, end_s + 1e-6) == min(20, begun + 1)
