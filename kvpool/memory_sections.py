"""Collation of planned writes: sections of a slab to and from the paged pool. Runs in the worker
that owns the blocks; the slab may be another process's, seen through a window.

On a CUDA device the work is queued on the caller's current stream; the caller waits for it.
"""

from __future__ import annotations

import torch

from kvpool.codec import Codec, WireFormat
from kvpool.memory import KvMemory
from kvpool.memory_codec import gather_changed, scatter_changed
from kvpool.memory_rows import plane_rows, section_rows
from kvpool.memory_views import plane_views, row_index, slab_views
from kvpool.reslice import End
from kvpool.write import Section, Side, Write


def gather_write(memory: KvMemory, side: Side, write: Write, out: torch.Tensor) -> None:
    """The source's blocks into `out`, uint8 `[write.nbytes]`, in the write's format."""
    slab = out if out.device == _device(memory) else torch.empty_like(out, device=_device(memory))
    for section in write.sections:
        _gather(memory, side, section, write.wire, slab)
    if slab is not out:
        out.copy_(slab)


def scatter_write(memory: KvMemory, side: Side, write: Write, payload: torch.Tensor) -> None:
    """`payload`, uint8 `[write.nbytes]`, into the target's blocks. Only their owner calls it."""
    slab = payload.to(_device(memory))
    for section in write.sections:
        _scatter(memory, side, section, write.wire, slab)


def _device(memory: KvMemory) -> torch.device:
    """With its number, which `memory.device` may lack."""
    return memory.flat.device


def _gather(
    memory: KvMemory, side: Side, section: Section, wire: WireFormat, slab: torch.Tensor
) -> None:
    if slab.is_cuda:
        from kvpool.memory_triton import gather_planes

        views = plane_views(memory, section, wire, slab, End.SOURCE)
        gather_planes(views, _slots(section, side), wire)
    elif _is_verbatim(memory, wire):
        payload = slab[section.offset_bytes : section.offset_bytes + section.nbytes]
        section_rows(memory, section, side, End.SOURCE).gather(payload)
    else:
        dtype = getattr(torch, memory.layout.dtype)
        parts = slab_views(section, wire, slab)
        for plane, seen in zip(section.part.planes, parts, strict=True):
            rows = plane_rows(memory, section, side, End.SOURCE, plane)
            gather_changed(seen, rows, dtype, wire.codec)


def _scatter(
    memory: KvMemory, side: Side, section: Section, wire: WireFormat, slab: torch.Tensor
) -> None:
    if slab.is_cuda:
        from kvpool.memory_triton import scatter_planes

        views = plane_views(memory, section, wire, slab, End.TARGET)
        scatter_planes(views, _slots(section, side), wire)
    elif _is_verbatim(memory, wire):
        payload = slab[section.offset_bytes : section.offset_bytes + section.nbytes]
        section_rows(memory, section, side, End.TARGET).scatter(payload)
    else:
        dtype = getattr(torch, memory.layout.dtype)
        parts = slab_views(section, wire, slab)
        for plane, seen in zip(section.part.planes, parts, strict=True):
            rows = plane_rows(memory, section, side, End.TARGET, plane)
            scatter_changed(seen, rows, dtype, wire.codec)


def _is_verbatim(memory: KvMemory, wire: WireFormat) -> bool:
    """Whether the slab holds the pool's own bits."""
    return wire.codec is Codec.NONE and wire.dtype == memory.layout.dtype


def _slots(section: Section, side: Side) -> torch.Tensor:
    return row_index(side.tables[section.part.group], section, side.block_size, 1)
