"""Collation of planned writes: sections of a slab to and from the paged pool. Runs in the worker
that owns the blocks; the slab may be another process's, seen through a window.

One strided copy per (run of adjacent blocks, plane) covers all layers of a section.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvpool.memory import KvMemory
from kvpool.plan import TokenRun
from kvpool.reslice import GroupSlice
from kvpool.transfer_plan import Section, Side, Write


def gather_write(memory: KvMemory, side: Side, write: Write, out: torch.Tensor) -> None:
    """The source's blocks into `out`, uint8 `[write.nbytes]`."""
    if out.device != memory.device:
        staging = torch.empty_like(out, device=memory.device)
        gather_write(memory, side, write, staging)
        out.copy_(staging)
        return
    for section in write.sections:
        planes = _source_planes(memory, section.part)
        for in_pool, in_slab in _pairs(planes, side.runs(section), section, out):
            in_slab.copy_(in_pool)


def scatter_write(memory: KvMemory, side: Side, write: Write, payload: torch.Tensor) -> None:
    """`payload`, uint8 `[write.nbytes]`, into the target's blocks. Only their owner calls it."""
    payload = payload.to(memory.device)
    for section in write.sections:
        planes = _target_planes(memory, section.part)
        for in_pool, in_slab in _pairs(planes, side.runs(section), section, payload):
            in_pool.copy_(in_slab)


def _source_planes(memory: KvMemory, part: GroupSlice) -> list[torch.Tensor]:
    """# plane of `part` |-> `[layers, slots, heads, dim]`, the layers and heads that travel"""
    return [
        memory.planes[part.group][plane.plane]
        .narrow(0, part.source_layer, part.layers)
        .narrow(2, plane.source_head, plane.heads)
        for plane in part.planes
    ]


def _target_planes(memory: KvMemory, part: GroupSlice) -> list[torch.Tensor]:
    """# plane of `part` |-> `[layers, slots, heads, dim]`, the layers and heads that arrive"""
    return [
        memory.planes[part.group][plane.plane]
        .narrow(0, part.target_layer, part.layers)
        .narrow(2, plane.target_head, plane.heads)
        for plane in part.planes
    ]


def _pairs(
    planes: Sequence[torch.Tensor], runs: Sequence[TokenRun], section: Section, slab: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(in the pool, in the slab) of each copy, both `[layers, tokens of the run, heads, dim]`."""
    views = _slab_planes(section, slab, planes[0].dtype)
    for run in runs:
        for plane, in_slab in zip(planes, views, strict=True):
            yield (
                plane.narrow(1, run.slot, run.tokens),
                in_slab.narrow(1, run.position, run.tokens),
            )


def _slab_planes(section: Section, slab: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """# plane of the section |-> `[layers, tokens, heads, dim]`, a strided view of the slab"""
    end = section.offset_bytes + section.nbytes
    elements = slab[section.offset_bytes : end].view(dtype)
    layer_elements = section.tokens * section.part.elements_per_token_layer
    views, at = [], elements.storage_offset()
    for plane in section.part.planes:
        shape = (section.part.layers, section.tokens, plane.heads, plane.dim)
        strides = (layer_elements, plane.elements, plane.dim, 1)
        views.append(elements.as_strided(shape, strides, at))
        at += section.tokens * plane.elements
    return views
