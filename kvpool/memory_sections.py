"""Collation of planned writes: sections of a slab to and from the paged pool. Runs in the worker
that owns the blocks; the slab may be another process's, seen through a window.
"""

from __future__ import annotations

import torch

from kvpool.codec import Codec
from kvpool.memory import KvMemory
from kvpool.memory_codec import gather_changed, scatter_changed
from kvpool.memory_rows import plane_rows
from kvpool.memory_views import End, plane_views
from kvpool.transfer_plan import Side, Write


def gather_write(memory: KvMemory, side: Side, write: Write, out: torch.Tensor) -> None:
    """The source's blocks into `out`, uint8 `[write.nbytes]`, in the write's format."""
    if out.device != memory.device:
        staging = torch.empty_like(out, device=memory.device)
        gather_write(memory, side, write, staging)
        out.copy_(staging)
        return
    for section in write.sections:
        for views in plane_views(memory, section, write.wire, out, End.SOURCE):
            if _is_verbatim(memory, write):
                plane_rows(views, section, side).gather(views.values)
            else:
                rows = plane_rows(views, section, side, by_token=True)
                gather_changed(views, rows, write.wire.codec)


def scatter_write(memory: KvMemory, side: Side, write: Write, payload: torch.Tensor) -> None:
    """`payload`, uint8 `[write.nbytes]`, into the target's blocks. Only their owner calls it."""
    payload = payload.to(memory.device)
    for section in write.sections:
        for views in plane_views(memory, section, write.wire, payload, End.TARGET):
            if _is_verbatim(memory, write):
                plane_rows(views, section, side).scatter(views.values)
            else:
                rows = plane_rows(views, section, side, by_token=True)
                scatter_changed(views, rows, write.wire.codec)


def _is_verbatim(memory: KvMemory, write: Write) -> bool:
    return write.wire.codec is Codec.NONE and write.wire.dtype == memory.layout.dtype
