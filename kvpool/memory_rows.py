"""Copies of a section's plane, bit by bit, between pool and slab, as rows of wide words. Runs in the
worker that owns the blocks; for the CPU and for devices without kernels of ours.

PyTorch's indexing kernels copy an element at a time, so rows are seen as the widest words that fit.
Where few long runs of adjacent blocks make up a plane, each is one strided copy instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch

from kvpool.memory_views import PlaneViews, row_index
from kvpool.transfer_plan import Section, Side

_WORDS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_LONG_RUN_BYTES = 4 << 20
"""From this mean size on, over all layers, copies of runs are as fast as indexing (measured)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Row `r` of the slab is row `index[r]` of the pool; both `[layers, rows, words]`."""

    pool: torch.Tensor
    slab: torch.Tensor
    index: torch.Tensor

    def gather(self) -> None:
        if runs := self._long_runs():
            for row, pool_row, count in runs:
                self.slab.narrow(1, row, count).copy_(self.pool.narrow(1, pool_row, count))
        else:
            index = self.index.to(self.pool.device)
            torch.ops.aten.index.Tensor_out(self.pool, [None, index], out=self.slab)

    def scatter(self) -> None:
        if runs := self._long_runs():
            for row, pool_row, count in runs:
                self.pool.narrow(1, pool_row, count).copy_(self.slab.narrow(1, row, count))
        else:
            self.pool.index_copy_(1, self.index.to(self.pool.device), self.slab)

    def _long_runs(self) -> list[tuple[int, int, int]]:
        """(first row in the slab, in the pool, rows) of each; empty where indexing is faster."""
        breaks = (self.index.diff() != 1).nonzero().flatten() + 1
        count = len(breaks) + 1
        nbytes = self.slab.numel() * self.slab.element_size()
        if count > 1 and nbytes < _LONG_RUN_BYTES * count:
            return []
        starts = [0, *breaks.tolist()]
        ends = [*starts[1:], len(self.index)]
        pool_rows = self.index[starts].tolist()
        return [(s, p, e - s) for s, p, e in zip(starts, pool_rows, ends, strict=True)]


def plane_rows(views: PlaneViews, section: Section, side: Side) -> Rows:
    """The rows are as long as alignment allows: whole blocks, tokens, or a token's head slice."""
    held, heads = views.pool.shape[2], views.values.shape[2]
    table = side.tables[section.part.group]
    if heads == held:
        grain = gcd(side.block_size, section.start, section.tokens)
        index = row_index(table, section, side.block_size, grain)
        row_elements = grain * views.pool[0, 0].numel()
    else:
        unit = gcd(held, heads, views.head)
        slots = row_index(table, section, side.block_size, 1)
        units = torch.arange(views.head // unit, (views.head + heads) // unit)
        index = (slots[:, None] * (held // unit) + units).flatten()
        row_elements = unit * views.pool.shape[3]
    layers = views.pool.shape[0]
    pool = views.pool.view(layers, -1, row_elements)
    slab = views.values.view(layers, -1, row_elements)
    word = _widest_word(pool, slab)
    return Rows(pool=pool.view(word), slab=slab.view(word), index=index)


def _widest_word(*tensors: torch.Tensor) -> torch.dtype:
    """In which both can be seen: every row starts and ends at a multiple of it."""
    common = max(_WORDS)
    for tensor in tensors:
        size = tensor.element_size()
        starts = (tensor.storage_offset(), tensor.stride(0), tensor.shape[2])
        common = gcd(common, tensor.data_ptr(), *(size * start for start in starts))
    return _WORDS[common]
