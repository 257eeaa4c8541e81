"""Compares attention backends by whole decode steps, at the start of a worker.

Each has an engine of its own over the same memory. Its steps run as a worker's do: planned,
launched behind one another, replayed where they are recorded, and drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, repeat
from math import inf
from statistics import fmean

from engine.core.fitting import Shape
from engine.core.step import StepBatch
from engine.flight import Launched
from engine.runner import Engine
from engine.time_profile import slices_of
from kvpool.core.layout.layout import KvLayout

CONTEXT_TOKENS = 2000
MOST_SEQUENCES = 64
LEAST_GAIN = 0.05
"""The first of the backends is left only for one whose steps take so much less."""
_WARM, _STEPS, _ROUNDS = 3, 16, 3

Times = tuple[float, ...]
"""Seconds of a step with one sequence, and with many."""


def sequences_of(most_running: int) -> tuple[int, ...]:
    """How many decode in the steps that are compared."""
    return tuple(sorted({1, min(most_running, MOST_SEQUENCES)}))


def blocks_wanted(layout: KvLayout, most_running: int, longest: int, free_bytes: int) -> int:
    """Each sequence has blocks of its own, in up to a quarter of what is free. Beyond that they
    share them."""
    each = layout.blocks_for(min(CONTEXT_TOKENS, longest))
    affordable = free_bytes // 4 // layout.bytes_per_block
    return max(each, min(affordable, sequences_of(most_running)[-1] * each))


def warm(engine: Engine, sequences: int) -> None:
    """What only the first steps do is not part of their time."""
    for size in sequences_of(sequences):
        _step_s(engine, size, _WARM, time.perf_counter)


def step_times(
    engines: Mapping[str, Engine],
    most_running: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:
    """The least of some rounds, in which the engines take turns. They are warm."""
    sizes = sequences_of(most_running)
    taken = {name: [inf] * len(sizes) for name in engines}
    for _ in range(_ROUNDS):
        for name, engine in engines.items():
            for place, sequences in enumerate(sizes):
                found = _step_s(engine, sequences, _STEPS, clock)
                taken[name][place] = min(taken[name][place], found)
    return {name: tuple(found) for name, found in taken.items()}


def fastest(times: Mapping[str, Times]) -> str:
    """The first unless another gains enough, as the mean of its shares of the first's times."""
    first = next(iter(times))
    shares = {name: _share(found, times[first]) for name, found in times.items()}
    best = min(shares, key=shares.__getitem__)
    return best if shares[best] <= 1 - LEAST_GAIN else first


def _share(found: Times, of: Times) -> float:
    return fmean(own / other for own, other in zip(found, of, strict=True))


def told(times: Mapping[str, Times], most_running: int) -> str:
    """For the log."""
    sizes = " and ".join(map(str, sequences_of(most_running)))
    each = (
        f"{name} {' and '.join(f'{1e3 * seconds:.2f}' for seconds in found)}"
        for name, found in times.items()
    )
    return f"ms of a decode step of {sizes} sequences: {', '.join(each)}"


def _step_s(engine: Engine, sequences: int, steps: int, clock: Callable[[], float]) -> float:
    batches = _decode_steps(engine, sequences, steps)
    engine.run(next(batches))  # nothing else is on the device
    begin = clock()
    run = run_behind if engine.can_follow else run_apart
    run(engine, batches)
    return (clock() - begin) / steps


def run_behind(engine: Engine, batches: Iterable[StepBatch]) -> None:
    """As a worker does it, in one thread: two steps at most are launched."""
    before: Launched | None = None
    for batch in batches:
        launched = engine.launch(batch, before=before)
        if before is not None:
            before.collect()
        before = launched
    if before is not None:
        before.collect()


def run_apart(engine: Engine, batches: Iterable[StepBatch]) -> None:
    for batch in batches:
        engine.run(batch)


def _decode_steps(engine: Engine, sequences: int, steps: int) -> Iterator[StepBatch]:
    """One, and `steps` at the same positions: only their tokens come from the step before."""
    context = min(CONTEXT_TOKENS, engine.facts.max_model_len)
    slices = slices_of(engine, Shape(rows=sequences, tokens=1, context=context - 1))
    if not engine.can_follow:
        return repeat(StepBatch(slices=slices), 1 + steps)
    behind = tuple(replace(piece, follows=row) for row, piece in enumerate(slices))
    return chain(repeat(StepBatch(slices=slices), 2), repeat(StepBatch(slices=behind), steps - 1))
