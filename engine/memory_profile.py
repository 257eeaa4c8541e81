"""Measures the memory that a step needs beside weights and KV: one pass at the largest chunk and
batch, with the largest number of scored tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from engine.attention.torch_plan import GATHER_BYTES, layer_block_bytes
from engine.core.sizing import EngineLimits, MemoryProfile
from engine.core.step import MOST_SCORED_TOKENS, SampleRequest, Scoring, SequenceSlice, StepBatch
from engine.device.host_memory import available_bytes
from engine.model.model import Model
from kvpool.core.layout.layout import BlockId, KvLayout
from kvpool.core.transfer.slabs import plan_staging
from kvpool.memory.kv_memory import KvMemory
from kvrelay.types import RequestKey, Sampling

_GPU_SLABS = 2


def profile_memory(
    model: Model,
    layout: KvLayout,
    limits: EngineLimits,
    max_model_len: int,
    run: Callable[[KvMemory, StepBatch], object],
    *,
    copies_kv: bool = True,
) -> MemoryProfile:
    """`run` executes a step in the given memory. Contexts are short here; the needs of long ones
    are computed: gathered KV and masks, with `copies_kv`."""
    chunk = min(limits.prefill_chunk_tokens, max_model_len)
    memory = KvMemory(layout, layout.blocks_for(chunk), model.device)
    batch = _largest_batch(layout, chunk, limits.max_running_requests)
    peak = _peak_bytes(model.device, lambda: run(memory, batch))
    long = _long_bytes(layout, chunk, max_model_len) if copies_kv else 0
    return MemoryProfile(
        total_bytes=_total_bytes(model),
        weight_bytes=model.weight_bytes,
        activation_bytes=peak + long,
        staging_bytes=_staging_bytes(model.device, layout, limits),
    )


def _staging_bytes(device: torch.device, layout: KvLayout, limits: EngineLimits) -> int:
    """On a CPU all slabs take memory from the KV. A GPU holds two copies of slabs, one of gathered
    and one of received tokens; the slabs themselves are in the host's memory."""
    if not limits.staging_slabs:
        return 0
    staging = plan_staging(
        layout,
        slabs=limits.staging_slabs,
        chunk_tokens=limits.prefill_chunk_tokens,
        total_bytes=limits.staging_bytes,
        on_cpu=device.type == "cpu",
    )
    on_host = limits.staging_slabs + limits.sending_slabs
    return staging.slab_bytes * (on_host if device.type == "cpu" else _GPU_SLABS)


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
    request = SampleRequest(sampling=sampling, choice=0, index=0, prompt_ids=(), emitted_ids=())
    return SequenceSlice(
        key=RequestKey("profile", 0),
        choice=0,
        token_ids=(0,) * tokens,
        start=0,
        tables=(blocks,) * len(layout.groups),
        samples=(request,),
    )


def _peak_bytes(device: torch.device, step: Callable[[], object]) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
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


def _total_bytes(model: Model) -> int:
    """The GPU's whole memory; on a CPU the memory available before the weights were loaded."""
    if model.device.type == "cuda":
        _, total = torch.cuda.mem_get_info(model.device)
        return total
    return available_bytes() + model.weight_bytes
