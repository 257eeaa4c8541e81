"""Python's share of a decode step: what preparing it and taking its tokens costs, model apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from bench.report import Row
from engine.core.step import SampleRequest, SequenceSlice, StepBatch
from engine.runner import Engine
from engine.sampling.sampler import sample
from kvpool.core.layout.layout import BlockId, KvLayout
from kvrelay.types import RequestKey, Sampling

SEQUENCES, CONTEXT = 256, 512
_VOCAB = 64
"""So small that choosing a token costs next to nothing but its Python."""
_REPEATS = 15


def measure(engine: Engine) -> Row:
    """CPU time of the calling thread, with one thread. Tables are those of the step before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        parts = _parts(engine)
        seconds = {name: _thread_s(run) for name, run in parts.items()}
    finally:
        torch.set_num_threads(threads)
    each = ", ".join(f"{name} {1e3 * value:.2f}" for name, value in seconds.items())
    return Row(
        name=f"Python of a decode step, {SEQUENCES} sequences of {CONTEXT}",
        value=1e3 * sum(seconds.values()),
        unit="ms",
        against="the limit",
        against_value=2.0,
        goal=1.0,
        method=f"CPU time of one thread, without the model's own ({each})",
        lower_is_better=True,
    )


def _parts(engine: Engine) -> dict[str, Callable[[], object]]:
    prepare = engine._planner.plan if engine.backend is None else engine.backend.prepare
    batch = StepBatch(slices=tuple(_slice(engine.layout, row) for row in range(SEQUENCES)))
    logits = torch.randn(SEQUENCES, _VOCAB)
    wanted = [piece.samples for piece in batch.slices]
    indices = [piece.index for piece in batch.slices]
    return {
        "planning": lambda: prepare(batch.slices),
        "sampling": lambda: sample(logits, wanted, indices),
        "prediction": lambda: batch.work,
    }


def _slice(layout: KvLayout, row: int) -> SequenceSlice:
    blocks = layout.blocks_for(CONTEXT + 1)
    table = tuple(BlockId(row * blocks + i) for i in range(blocks))
    sampling = Sampling(max_tokens=64, seed=0)
    request = SampleRequest(sampling=sampling, choice=0, prompt_ids=(), emitted_ids=())
    return SequenceSlice(
        key=RequestKey(str(row), 0),
        choice=0,
        token_ids=(5,),
        start=CONTEXT,
        tables=(table,) * len(layout.groups),
        samples=(request,),
        index=3,
    )


def _thread_s(run: Callable[[], object]) -> float:
    found = []
    for _ in range(_REPEATS):
        began_s = time.thread_time()
        run()
        found.append(time.thread_time() - began_s)
    return median(found)
