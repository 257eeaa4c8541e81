"""Decode steps launched before the tokens of those before are known, beside single ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from bench.report import Row
from engine.core.step import StepBatch
from engine.flight import Flight
from engine.runner import Engine

_STEPS, _WARM = 50, 5


def ahead_row(engine: Engine, batch: StepBatch, name: str, method: str) -> Row:
    """Every step at the same positions: only its tokens come from the one before."""
    single_s = _step_s(lambda steps: _single(engine, batch, steps))
    ahead_s = _step_s(lambda steps: _ahead(engine, batch, steps))
    return Row(
        name=f"decode step launched ahead, {name}",
        value=1e3 * ahead_s,
        unit="ms",
        against="single steps",
        against_value=1e3 * single_s,
        lower_is_better=True,
        method=method,
        spread=f"mean of {_STEPS} in a row",
    )


def _step_s(run: Callable[[int], None]) -> float:
    run(_WARM)
    begin = time.perf_counter()
    run(_STEPS)
    return (time.perf_counter() - begin) / _STEPS


def _single(engine: Engine, batch: StepBatch, steps: int) -> None:
    for _ in range(steps):
        engine.run(batch)


def _ahead(engine: Engine, batch: StepBatch, steps: int) -> None:
    """As a worker does it, in one thread."""
    slices = tuple(replace(piece, follows=i) for i, piece in enumerate(batch.slices))
    flight: Flight = engine.launch(batch)
    for _ in range(steps - 1):
        behind = engine.launch(StepBatch(slices=slices), before=flight)
        flight.collect()
        flight = behind
    flight.collect()
