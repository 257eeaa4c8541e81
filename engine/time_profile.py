"""Times a few steps of an engine that doesn't serve yet, and fits their coefficients.

Runs in the worker, in free blocks of its KV memory, whose content is never read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median_low

import torch

from engine.core.fitting import Shape, Timed, design, fit_times
from engine.core.roofline import CPU_THREAD, CUDA, ModelSize, guessed_times
from engine.core.step import SampleRequest, SequenceSlice, StepBatch
from engine.core.step_times import LinearTimes
from engine.runner import Engine
from kvpool.core.layout.layout import BlockId
from kvrelay.types import RequestKey, Sampling

BUDGET_S = 0.5
"""Only the first round of the essential shapes may take longer."""
_MOST_ROUNDS = 7
_SAMPLE = SampleRequest(
    sampling=Sampling(max_tokens=1, seed=0), choice=0, prompt_ids=(), emitted_ids=()
)


def guess_times(engine: Engine, *, most_sequences: int) -> LinearTimes:
    """A guess, without running anything."""
    model, layout = engine.model, engine.layout
    size = ModelSize(
        weight_bytes=model.weight_bytes,
        parameters=model.weight_bytes // model.dtype.itemsize,
        layers=sum(len(group.layers) for group in layout.groups),
        kv_elements=layout.bytes_per_token // layout.element_bytes,
        kv_token_bytes=layout.bytes_per_token,
    )
    device = CUDA if model.device.type == "cuda" else CPU_THREAD
    return guessed_times(size, device, most_sequences=most_sequences)


def profile_times(
    engine: Engine,
    *,
    chunk_tokens: int,
    most_sequences: int,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> LinearTimes:
    """Repeats the same shapes until the budget is spent; medians are fitted."""
    shapes = design(
        chunk_tokens=chunk_tokens,
        most_sequences=most_sequences,
        max_model_len=engine.facts.max_model_len,
        pool_tokens=engine.memory.blocks * engine.layout.block_size,
    )
    # One-time work of the first step of a size is not part of its time.
    for tokens, rows in {(shape.rows * shape.tokens, shape.rows) for shape, _ in shapes}:
        engine.model.prepare(tokens, rows)
    seconds: dict[Shape, list[float]] = {}
    started_s = clock()
    for shape, is_essential in shapes * _MOST_ROUNDS:
        due = is_essential and shape not in seconds
        if due or clock() - started_s < budget_s:
            seconds.setdefault(shape, []).append(time_shape(engine, shape, clock))
    return fit_times([Timed(shape.work, median_low(each)) for shape, each in seconds.items()])


def time_shape(
    engine: Engine, shape: Shape, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of one such step. Only before the engine serves."""
    batch = StepBatch(slices=slices_of(engine, shape))
    _settle(engine)
    started_s = clock()
    engine.run(batch)
    _settle(engine)
    return clock() - started_s


def _settle(engine: Engine) -> None:
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize(engine.model.device)


def slices_of(engine: Engine, shape: Shape) -> tuple[SequenceSlice, ...]:
    """They all draw, and compute what nobody reads."""
    return tuple(_slice(engine, shape, row) for row in range(shape.rows))


def _slice(engine: Engine, shape: Shape, row: int) -> SequenceSlice:
    """Rows have their own blocks as long as there are enough."""
    needed = engine.layout.blocks_for(shape.context + shape.tokens)
    first = row * needed
    table = tuple(BlockId((first + i) % engine.memory.blocks) for i in range(needed))
    return SequenceSlice(
        key=RequestKey("profile", row),
        choice=0,
        token_ids=(0,) * shape.tokens,
        start=shape.context,
        tables=(table,) * len(engine.layout.groups),
        samples=(_SAMPLE,),
    )
