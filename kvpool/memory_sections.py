"""Collation of planned writes: sections of a slab to and from the paged pool. Runs in the worker
that owns the blocks; the slab may be another process's, seen through a window.
"""

from __future__ import annotations

import torch

from kvpool.codec import Codec
from kvpool.memory import KvMemory
from kvpool.memory_codec import gather_changed, scatter_changed
from kvpool.memory_rows import plane_rows
from kvpool.memory_views import End, plane_views, token_slots
from kvpool.transfer_plan import Side, Write


def gather_write(memory: KvMemory, side: Side, write: Write, out: torch.Tensor) -> None:
    """The source's blocks into `out`, uint8 `[write.nbytes]`, in the format that the write names."""
    if out.device != memory.device:
        staging = torch.empty_like(out, device=memory.device)
        gather_write(memory, side, write, staging)
        out.copy_(staging)
        return
    for section in write.sections:
        views = plane_views(memory, section, write.wire, out, End.SOURCE)
        if _is_verbatim(memory, write):
            for plane in views:
                plane_rows(plane, section, side).gather()
        else:
            slots = token_slots(side, section)
            for plane in views:
                gather_changed(plane, slots, write.wire.codec)


def scatter_write(memory: KvMemory, side: Side, write: Write, payload: torch.Tensor) -> None:
    """`payload`, uint8 `[write.nbytes]`, into the target's blocks. Only their owner calls it."""
    payload = payload.to(memory.device)
    for section in write.sections:
        views = plane_views(memory, section, write.wire, payload, End.TARGET)
        if _is_verbatim(memory, write):
            for plane in views:
                plane_rows(plane, section, side).scatter()
        else:
            slots = token_slots(side, section)
            for plane in views:
                scatter_changed(plane, slots)


def _is_verbatim(memory: KvMemory, write: Write) -> bool:
    return write.wire.codec is Codec.NONE and write.wire.dtype == memory.layout.dtype
