"""A few steps tell how long all take. Printed errors are of steps that were not among them."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import thread_time

import pytest

import engine.bundled
from engine.core.fitting import Shape, Timed, relative_errors
from engine.core.sizing import EngineLimits
from engine.core.step import StepBatch, StepOutcome
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from engine.runner import Engine
from engine.time_profile import guess_times, profile_times, time_shape
from tests.models import random_checkpoint

BUNDLED = Path(engine.bundled.__file__).parent / "checkpoint"
CHUNK, MOST = 256, 16
OTHERS = (
    Shape(rows=1, tokens=100),
    Shape(rows=1, tokens=60, context=300),
    Shape(rows=3, tokens=50),
    Shape(rows=1, tokens=1, context=200),
    Shape(rows=6, tokens=1, context=100),
    Shape(rows=12, tokens=1, context=300),
    Shape(rows=16, tokens=1, context=64),
)


def load(path: Path) -> Engine:
    limits = EngineLimits(max_model_len=None, prefill_chunk_tokens=CHUNK, max_running_requests=MOST)
    return load_engine(
        open_checkpoint(str(path), None),
        device="cpu",
        dtype="auto",
        block_size=16,
        blocks=400,
        limits=limits,
    )


@pytest.fixture(scope="module")
def bundled() -> Engine:
    return load(BUNDLED)


def held_out(engine: Engine) -> float:
    """By a clock that others on this machine don't slow."""
    times = profile_times(engine, chunk_tokens=CHUNK, most_sequences=MOST, clock=thread_time)
    timed = [
        Timed(s.work, median(time_shape(engine, s, thread_time) for _ in range(5))) for s in OTHERS
    ]
    error = median(relative_errors(times, timed))
    print(f"held out {error:.1%}, of the fit's own {times.error:.1%}: {times}")
    return error


def are_predicted(engine: Engine) -> bool:
    """By one profile of three: others also take the caches away from some steps."""
    return any(held_out(engine) < 0.8 for _ in range(3))


@pytest.mark.processes  # starts none, but those of others may take the caches away three times
def test_the_bundled_models_steps_are_predicted(bundled: Engine) -> None:
    assert are_predicted(bundled)


@pytest.mark.processes
def test_a_random_models_steps_are_predicted(tmp_path: Path) -> None:
    assert are_predicted(load(random_checkpoint(tmp_path, max_position_embeddings=512)))


def test_a_windowed_models_steps_can_be_timed(tmp_path: Path) -> None:
    engine = load(random_checkpoint(tmp_path, "gpt_oss", max_position_embeddings=512))
    times = profile_times(engine, chunk_tokens=CHUNK, most_sequences=MOST, budget_s=0.0)
    assert times.step_s(Shape(rows=8, tokens=1, context=100).work) > 0


def test_a_guess_says_something_of_every_step(bundled: Engine) -> None:
    guess = guess_times(bundled, most_sequences=MOST)
    assert all(1e-5 < guess.step_s(shape.work) < 10 for shape in OTHERS)


class Paced:
    """Each step takes a second of a clock that nobody else moves."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.now_s = 0.0
        self.batches: list[StepBatch] = []

    def run(self, batch: StepBatch) -> StepOutcome:
        self.now_s += 1.0
        self.batches.append(batch)
        return StepOutcome(sampled=())

    def clock(self) -> float:
        return self.now_s


@pytest.mark.parametrize(("budget_s", "steps"), [(0.0, 5), (10.0, 10), (30.0, 30)])
def test_no_more_is_timed_than_the_budget_allows(
    bundled: Engine, monkeypatch: pytest.MonkeyPatch, budget_s: float, steps: int
) -> None:
    paced = Paced(bundled)
    monkeypatch.setattr(bundled, "run", paced.run)
    times = profile_times(
        bundled,
        chunk_tokens=CHUNK,
        most_sequences=MOST,
        budget_s=budget_s,
        clock=paced.clock,
    )
    assert len(paced.batches) == steps
    assert times.step_s(Shape(rows=MOST, tokens=1).work) == pytest.approx(1.0)
    for batch in paced.batches:
        assert all(0 <= b < bundled.memory.blocks for s in batch.slices for b in s.tables[0])
