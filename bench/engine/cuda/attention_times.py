"""Times a backend's attention on a CUDA device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch

from engine.attention.backend import Backend, GroupShape
from engine.attention.choosing.needs import Wanted
from engine.core.step import SequenceSlice
from engine.model.interface import AttentionState, Scores
from kvpool.core.layout.layout import BlockId, KvLayout
from kvpool.memory.kv_memory import KvMemory
from kvrelay.types import RequestKey

Open = Callable[[KvMemory, tuple[GroupShape, ...], Mapping[int, tuple[int, int]]], Backend]

Grid = Mapping[str, tuple[int, int, int]]
"""# name |-> (sequences, tokens of each, tokens before them)"""
_WARM, _RUNS = 3, 9
_BUSY_CYCLES = 2_000_000  # a millisecond


def measure(open_backend: Open, wanted: Wanted, grid: Grid) -> dict[str, float]:
    """# work |-> median seconds of one layer of the group with the most layers"""
    with torch.cuda.device(wanted.device) if wanted.on_cuda else nullcontext():
        return {name: measure_work(open_backend, wanted, *work) for name, work in grid.items()}


@torch.inference_mode()
def measure_work(
    open_backend: Open, wanted: Wanted, sequences: int, tokens: int, cached: int
) -> float:
    """For this many sequences with this many new tokens each, after `cached` others."""
    group = max(range(len(wanted.groups)), key=lambda g: len(wanted.layout.groups[g].layers))
    shape, layout = wanted.groups[group], _one_layer(wanted.layout, group)
    blocks = layout.blocks_for(tokens + cached)
    memory = KvMemory(layout, sequences * blocks, wanted.device)
    for plane in memory.planes[0]:
        plane.copy_(torch.randn_like(plane, dtype=wanted.dtype))
    backend = open_backend(memory, (shape,), {0: (0, 0)})
    state = backend.prepare([piece(i, tokens, cached, blocks) for i in range(sequences)]).state
    return time_layer(state, shape, wanted, sequences * tokens)


def piece(number: int, tokens: int, cached: int, blocks: int) -> SequenceSlice:
    """Sequence `number`; its blocks follow those of the one before."""
    table = tuple(BlockId(number * blocks + i) for i in range(blocks))
    key = RequestKey(f"measured-{number}", 0)
    return SequenceSlice(key=key, choice=0, token_ids=(0,) * tokens, start=cached, tables=(table,))


def time_layer(state: AttentionState, shape: GroupShape, wanted: Wanted, tokens: int) -> float:
    """Median seconds of one layer's call."""

    def random(heads: int, dim: int) -> torch.Tensor:
        made = torch.randn(1, tokens, heads, dim, dtype=wanted.dtype, device=wanted.device)
        return made.transpose(1, 2)

    query = random(shape.query_heads, shape.dim)
    key, value = random(shape.kv_heads, shape.dim), random(shape.kv_heads, shape.value_dim)
    scores = Scores(scaling=shape.dim**-0.5, window=shape.window)
    return time_device(lambda: state.attend(0, query, key, value, scores))


def time_device(run: Callable[[], object]) -> float:
    """Median seconds on the device, after some runs to warm up. The device is kept busy before, so
    that it gets the whole run at once. Without one: of a rehearsal, on the CPU."""
    if not torch.cuda.is_available():
        return _time_here(run)
    for _ in range(_WARM):
        run()
    times = []
    for _ in range(_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_BUSY_CYCLES)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _time_here(run: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    run()
    return time.perf_counter() - begun_s


def _one_layer(layout: KvLayout, group: int) -> KvLayout:
    return replace(layout, groups=(replace(layout.groups[group], layers=(0,)),))
