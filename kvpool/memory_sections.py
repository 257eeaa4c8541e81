"""Collation of planned writes: sections of a slab to and from the paged pool. Runs in the worker
that owns the blocks; the slab may be another process's, seen through a window.

On a CUDA device the work is queued on the caller's current stream; the caller waits for it.
"""

from __future__ import annotations

import torch

from kvpool.codec import WireFormat
from kvpool.memory import KvMemory
from kvpool.memory_codec import gather_changed, scatter_changed
from kvpool.memory_rows import plane_rows
from kvpool.memory_views import End, PlaneViews, plane_views, row_index
from kvpool.write import Section, Side, Write


def gather_write(memory: KvMemory, side: Side, write: Write, out: torch.Tensor) -> None:
    """The source's blocks into `out`, uint8 `[write.nbytes]`, in the write's format."""
    slab = out if out.device == _device(memory) else torch.empty_like(out, device=_device(memory))
    for section in write.sections:
        views = plane_views(memory, section, write.wire, slab, End.SOURCE)
        _gather(views, section, side, write.wire)
    if slab is not out:
        out.copy_(slab)


def scatter_write(memory: KvMemory, side: Side, write: Write, payload: torch.Tensor) -> None:
    """`payload`, uint8 `[write.nbytes]`, into the target's blocks. Only their owner calls it."""
    slab = payload.to(_device(memory))
    for section in write.sections:
        views = plane_views(memory, section, write.wire, slab, End.TARGET)
        _scatter(views, section, side, write.wire)


def _device(memory: KvMemory) -> torch.device:
    """With its number, which `memory.device` may lack."""
    return memory.planes[0][0].device


def _gather(planes: list[PlaneViews], section: Section, side: Side, wire: WireFormat) -> None:
    if planes[0].pool.is_cuda:
        from kvpool.memory_triton import gather_planes

        gather_planes(planes, _slots(section, side), wire)
        return
    for views in planes:
        if views.is_verbatim:
            plane_rows(views, section, side).gather(views.values)
        else:
            gather_changed(views, plane_rows(views, section, side, by_token=True), wire.codec)


def _scatter(planes: list[PlaneViews], section: Section, side: Side, wire: WireFormat) -> None:
    if planes[0].pool.is_cuda:
        from kvpool.memory_triton import scatter_planes

        scatter_planes(planes, _slots(section, side), wire)
        return
    for views in planes:
        if views.is_verbatim:
            plane_rows(views, section, side).scatter(views.values)
        else:
            scatter_changed(views, plane_rows(views, section, side, by_token=True), wire.codec)


def _slots(section: Section, side: Side) -> torch.Tensor:
    return row_index(side.tables[section.part.group], section, side.block_size, 1)
