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
from kvpool.transfer_plan import Section, Side, Write


def gather_write(memory: KvMemory, side: Side, write: Write, out: torch.Tensor) -> None:
    """The source's blocks into `out`, uint8 `[write.nbytes]`, in the write's format."""
    if out.device != memory.device:
        staging = torch.empty_like(out, device=memory.device)
        gather_write(memory, side, write, staging)
        out.copy_(staging)
        return
    for section in write.sections:
        views = plane_views(memory, section, write.wire, out, End.SOURCE)
        if memory.device.type == "cuda":
            _gather_on_cuda(views, section, side, write.wire)
        else:
            _gather(views, section, side, write.wire)


def scatter_write(memory: KvMemory, side: Side, write: Write, payload: torch.Tensor) -> None:
    """`payload`, uint8 `[write.nbytes]`, into the target's blocks. Only their owner calls it."""
    payload = payload.to(memory.device)
    for section in write.sections:
        views = plane_views(memory, section, write.wire, payload, End.TARGET)
        if memory.device.type == "cuda":
            _scatter_on_cuda(views, section, side, write.wire)
        else:
            _scatter(views, section, side, write.wire)


def _gather(planes: list[PlaneViews], section: Section, side: Side, wire: WireFormat) -> None:
    for views in planes:
        if _is_verbatim(views):
            plane_rows(views, section, side).gather(views.values)
        else:
            gather_changed(views, plane_rows(views, section, side, by_token=True), wire.codec)


def _scatter(planes: list[PlaneViews], section: Section, side: Side, wire: WireFormat) -> None:
    for views in planes:
        if _is_verbatim(views):
            plane_rows(views, section, side).scatter(views.values)
        else:
            scatter_changed(views, plane_rows(views, section, side, by_token=True), wire.codec)


def _is_verbatim(views: PlaneViews) -> bool:
    return views.pool.dtype == views.values.dtype


def _gather_on_cuda(
    planes: list[PlaneViews], section: Section, side: Side, wire: WireFormat
) -> None:
    from kvpool.memory_triton import gather_plane

    slots = _device_slots(planes[0], section, side)
    with torch.cuda.device(slots.device):
        for views in planes:
            gather_plane(views, slots, wire)


def _scatter_on_cuda(
    planes: list[PlaneViews], section: Section, side: Side, wire: WireFormat
) -> None:
    from kvpool.memory_triton import scatter_plane

    slots = _device_slots(planes[0], section, side)
    with torch.cuda.device(slots.device):
        for views in planes:
            scatter_plane(views, slots, wire)


def _device_slots(views: PlaneViews, section: Section, side: Side) -> torch.Tensor:
    slots = row_index(side.tables[section.part.group], section, side.block_size, 1)
    return slots.int().to(views.pool.device)
