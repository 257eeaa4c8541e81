"""Collation of planned writes: sections of a slab to and from the paged pool. Runs in the worker
that owns the blocks; the slab may be another process's, seen through a window.

On a CUDA device the work is queued on the caller's current stream; the caller waits for it.
"""

from __future__ import annotations

import torch

from kvpool.codec import Codec, WireFormat
from kvpool.memory.codec import gather_changed, scatter_changed
from kvpool.memory.kv_memory import KvMemory
from kvpool.memory.parts import move_parts
from kvpool.memory.rows import plane_rows, section_rows
from kvpool.memory.views import plane_views, row_index, slab_views
from kvpool.reslice import End
from kvpool.write import Section, Side, Write


def gather_write(memory: KvMemory, side: Side, write: Write, out: torch.Tensor) -> None:
    """The source's blocks into `out`, uint8 `[write.nbytes]`, in the write's format."""
    slab = out if out.device == _device(memory) else torch.empty_like(out, device=_device(memory))
    for section in write.sections:
        _move(memory, side, section, write.wire, slab, End.SOURCE)
    if slab is not out:
        out.copy_(slab)


def scatter_write(memory: KvMemory, side: Side, write: Write, payload: torch.Tensor) -> None:
    """`payload`, uint8 `[write.nbytes]`, into the target's blocks. Only their owner calls it."""
    slab = payload.to(_device(memory))
    for section in write.sections:
        _move(memory, side, section, write.wire, slab, End.TARGET)


def _device(memory: KvMemory) -> torch.device:
    """With its number, which `memory.device` may lack."""
    return memory.parts[0].flat.device


def _move(
    memory: KvMemory, side: Side, section: Section, wire: WireFormat, slab: torch.Tensor, end: End
) -> None:
    """At the source out of the pool, at the target into it."""
    if memory.lies_apart or (slab.is_cuda and memory.map.ranks > 1):

        def move(part: KvMemory, own: Section, payload: torch.Tensor) -> None:
            _move(part, side, own, wire, payload, end)

        move_parts(memory, section, wire, slab, end, move)
    elif slab.is_cuda:
        _move_planes(memory, side, section, wire, slab, end)
    elif _is_verbatim(memory, wire):
        payload = slab[section.offset_bytes : section.offset_bytes + section.nbytes]
        rows = section_rows(memory, section, side, end)
        (rows.gather if end is End.SOURCE else rows.scatter)(payload)
    else:
        change = gather_changed if end is End.SOURCE else scatter_changed
        dtype = getattr(torch, memory.layout.dtype)
        views = slab_views(section, wire, slab)
        for plane, seen in zip(section.part.planes, views, strict=True):
            change(seen, plane_rows(memory, section, side, end, plane), dtype, wire.codec)


def _move_planes(
    memory: KvMemory, side: Side, section: Section, wire: WireFormat, slab: torch.Tensor, end: End
) -> None:
    from kvpool.memory.triton import gather_planes, scatter_planes

    views = plane_views(memory, section, wire, slab, end)
    slots = row_index(side.tables[section.part.group], section, side.block_size)
    (gather_planes if end is End.SOURCE else scatter_planes)(views, slots, wire)


def _is_verbatim(memory: KvMemory, wire: WireFormat) -> bool:
    """Whether the slab holds the pool's own bits."""
    return wire.codec is Codec.NONE and wire.dtype == memory.layout.dtype
