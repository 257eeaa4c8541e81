"""Measures the memory that an engine needs beside KV, before the rest of it is filled with KV.

A step's need is that of one pass at the largest chunk and batch, with the largest number of scored
tokens. On CUDA everything else is asked of the device when it is there: context, weights and
workspaces, and the decode steps' graphs, which are recorded for this over a few blocks, and
dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil

from engine.attention.torch_plan import GATHER_BYTES, layer_block_bytes
from engine.core.sizing import (
    MOST_CONTEXT_BYTES,
    STEP_BYTES,
    EngineLimits,
    MemoryProfile,
    in_steps,
    staging_bytes,
)
from engine.core.step import MOST_SCORED_TOKENS, SampleRequest, Scoring, SequenceSlice, StepBatch
from engine.device.cuda_memory import CudaMemory
from engine.device.host_memory import available_bytes
from engine.model.model import Model
from kvpool.core.layout.layout import BlockId, KvLayout
from kvpool.memory.kv_memory import KvMemory
from kvrelay.types import RequestKey, Sampling

Run = Callable[[KvMemory, StepBatch], object]
Record = Callable[[KvMemory], object]
"""Records the decode steps; they are there as long as the result is."""


def profile_memory(
    model: Model,
    layout: KvLayout,
    limits: EngineLimits,
    max_model_len: int,
    run: Run,
    *,
    copies_kv: bool = True,
    record: Record | None = None,
    staged: KvLayout | None = None,
) -> MemoryProfile:
    """`run` executes a step in the given memory. Contexts are short here; the needs of long ones
    are computed: gathered KV and masks, with `copies_kv`. `record`: see there; only on CUDA.
    `staged`: of what slabs hold, if that is more than this rank's `layout`."""
    chunk = min(limits.prefill_chunk_tokens, max_model_len)

    def measured() -> MemoryProfile:
        memory = KvMemory(layout, layout.blocks_for(chunk), model.device)
        batch = _largest_batch(layout, chunk, limits.max_running_requests)
        if model.device.type == "cuda":
            return _on_cuda(model, memory, lambda: run(memory, batch), record)
        return _on_cpu(model, lambda: run(memory, batch))

    found = measured()
    if model.device.type == "cuda":
        CudaMemory(model.device).release()  # with the blocks that were measured in
    return replace(
        found,
        activation_bytes=found.activation_bytes
        + (_long_bytes(layout, chunk, max_model_len) if copies_kv else 0),
        staging_bytes=staging_bytes(staged or layout, limits, on_cpu=model.device.type == "cpu"),
    )


def _on_cuda(
    model: Model, memory: KvMemory, step: Callable[[], object], record: Record | None
) -> MemoryProfile:
    device, blocks = CudaMemory(model.device), in_steps(memory.flat.numel())
    rounding = STEP_BYTES  # of the KV pool
    device.release()
    peak = device.peak_bytes(step)
    device.release()
    before = device.reading()
    recorded = record(memory) if record is not None else None
    device.trim()
    now = device.reading()
    del recorded
    return MemoryProfile(
        total_bytes=now.total_bytes,
        weight_bytes=model.weight_bytes,
        activation_bytes=peak,
        context_bytes=min(now.outside_bytes, MOST_CONTEXT_BYTES),
        kept_bytes=max(0, before.reserved_bytes - blocks - model.weight_bytes) + rounding,
        graph_bytes=max(0, now.reserved_bytes - before.reserved_bytes),
        free_bytes=now.free_bytes + blocks - rounding,
    )


def _on_cpu(model: Model, step: Callable[[], object]) -> MemoryProfile:
    """The memory that was available before the weights were loaded."""
    peak = _peak_rss(step)
    return MemoryProfile(
        total_bytes=available_bytes() + model.weight_bytes,
        weight_bytes=model.weight_bytes,
        activation_bytes=peak,
    )


def _long_bytes(layout: KvLayout, chunk: int, max_model_len: int) -> int:
    gathered = max(_gathered_bytes(layout, g, max_model_len) for g in range(len(layout.groups)))
    return gathered + 2 * len(layout.groups) * chunk * max_model_len * layout.element_bytes


def _gathered_bytes(layout: KvLayout, group: int, max_model_len: int) -> int:
    one_row = layout.blocks_for(max_model_len) * layer_block_bytes(layout, group)
    return max(one_row, GATHER_BYTES)


def _largest_batch(layout: KvLayout, chunk: int, rows: int) -> StepBatch:
    """A chunk and `rows` one-token sequences, all in the same blocks: only sizes matter here."""
    blocks = tuple(BlockId(i) for i in range(layout.blocks_for(chunk)))
    scored = Scoring(next_ids=(0,) * min(chunk, MOST_SCORED_TOKENS))
    largest = replace(_piece(layout, blocks, chunk), scoring=scored)
    return StepBatch(slices=(largest, *[_piece(layout, blocks[:1], 1)] * rows))


def _piece(layout: KvLayout, blocks: tuple[BlockId, ...], tokens: int) -> SequenceSlice:
    sampling = Sampling(max_tokens=1, seed=0, temperature=1.0)
    request = SampleRequest(sampling=sampling, choice=0, prompt_ids=(), emitted_ids=())
    return SequenceSlice(
        key=RequestKey("profile", 0),
        choice=0,
        token_ids=(0,) * tokens,
        start=0,
        tables=(blocks,) * len(layout.groups),
        samples=(request,),
    )


def _peak_rss(step: Callable[[], object]) -> int:
    before = psutil.Process().memory_info().rss
    _reset_peak_rss()
    step()
    return max(0, max(_peak_rss_bytes(), psutil.Process().memory_info().rss) - before)


def _reset_peak_rss() -> None:
    """Linux: 5 resets the process's high-water mark (proc(5), clear_refs)."""
    refs = Path("/proc/self/clear_refs")
    if refs.exists():
        refs.write_text("5")


def _peak_rss_bytes() -> int:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(found[0]) * 1024 if found else 0
