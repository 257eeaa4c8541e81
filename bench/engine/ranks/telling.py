"""What it costs to tell another rank of a decode step, beside the forward pass: rank 0's part, and
the other's until its index arrays stand."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TypeVar

from bench.report import Row
from engine.attention.inputs import TableCache, step_arrays
from engine.core.step import SampleRequest, SequenceSlice
from engine.parallel.message import StepHearer, StepKind, StepTeller
from kvpool.core.layout.layout import BlockId, KvLayout, LayerGroup, Plane
from kvrelay.types import RequestKey, Sampling

T = TypeVar("T")

SEQUENCES = 256
_STEPS = 64
_BLOCK = 16
_LAYOUT = KvLayout(
    groups=(LayerGroup(layers=(0,), planes=(Plane(name="k", heads=1, dim=8),)),),
    dtype="float32",
    block_size=_BLOCK,
)
_SAMPLE = SampleRequest(
    sampling=Sampling(max_tokens=64, seed=0), choice=0, prompt_ids=(), emitted_ids=()
)


def measure(context: int) -> Row:
    """CPU time of one thread; tables grow by a block every 16 steps, each at another."""
    ids = [BlockId(i) for i in range(SEQUENCES * (context // _BLOCK + _STEPS))]
    teller, hearer, cache = StepTeller(), StepHearer(), TableCache()
    ours, theirs = [], []
    for step in range(_STEPS):
        batch = [_slice(ids, context, row, step) for row in range(SEQUENCES)]
        seconds, message = _timed(partial(teller.encode, batch, StepKind()))
        ours.append(seconds)
        seconds, _ = _timed(partial(_hear, hearer, cache, message))
        theirs.append(seconds)
    tell_ms, hear_ms = 1e3 * median(ours), 1e3 * median(theirs)
    return Row(
        name=f"telling a rank of a decode step, {SEQUENCES} sequences of {context}",
        value=tell_ms + hear_ms,
        unit="ms",
        method=f"CPU time of one thread each: rank 0 {tell_ms:.2f}, the other {hear_ms:.2f}; "
        f"{len(message) / 1e3:.1f} kB in the last step",
    )


def _slice(ids: list[BlockId], context: int, row: int, step: int) -> SequenceSlice:
    tokens = context + row % _BLOCK + step
    first = row * (len(ids) // SEQUENCES)
    table = tuple(ids[first : first + tokens // _BLOCK + 1])
    return SequenceSlice(
        key=RequestKey(str(row), 0),
        choice=0,
        token_ids=(5,),
        start=tokens,
        tables=(table,),
        samples=(_SAMPLE,),
    )


def _hear(hearer: StepHearer, cache: TableCache, message: bytes) -> None:
    slices, _ = hearer.decode(message)
    step_arrays(_LAYOUT, slices, cache)


def _timed(run: Callable[[], T]) -> tuple[float, T]:
    began_s = time.thread_time()
    found = run()
    return time.thread_time() - began_s, found
