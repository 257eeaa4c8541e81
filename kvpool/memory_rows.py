"""Copies, bit by bit, between rows of the pool and rows of a slab. Runs in the worker that owns the
blocks; for the CPU and for devices without kernels of ours.

PyTorch's indexing kernels copy an element at a time, so rows are seen as the widest words that fit.
Where few long runs of adjacent blocks make up a plane, each is one strided copy instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import torch

from kvpool.memory_views import PlaneViews, row_index
from kvpool.write import Section, Side

_WORDS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_LONG_RUN_BYTES = 4 << 20
"""From this mean size on, over all layers, copies of runs are as fast as indexing (measured)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """A plane's rows in its section's order: the `r`-th is the pool's row `index[r]`.

    `pool` is `[layers, rows, row elements]`, `index` int64 on the same device.
    """

    pool: torch.Tensor
    index: torch.Tensor

    def part(self, layers: slice, rows: slice) -> Rows:
        return replace(self, pool=self.pool[layers], index=self.index[rows])

    def gather(self, slab: torch.Tensor) -> None:
        """Into `slab`, `[layers, tokens, heads, dim]`, with gaps only between layers."""
        pool, slab = self._as_words(slab)
        if runs := self._long_runs(slab):
            for row, pool_row, count in runs:
                slab.narrow(1, row, count).copy_(pool.narrow(1, pool_row, count))
        else:
            torch.ops.aten.index.Tensor_out(pool, [None, self.index], out=slab)

    def scatter(self, slab: torch.Tensor) -> None:
        """The inverse. Only the blocks' owner calls it."""
        pool, slab = self._as_words(slab)
        if runs := self._long_runs(slab):
            for row, pool_row, count in runs:
                pool.narrow(1, pool_row, count).copy_(slab.narrow(1, row, count))
        else:
            pool.index_copy_(1, self.index, slab)

    def _as_words(self, slab: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slab.view(slab.shape[0], len(self.index), -1)
        word = _widest_word(self.pool, rows)
        return self.pool.view(word), rows.view(word)

    def _long_runs(self, slab: torch.Tensor) -> list[tuple[int, int, int]]:
        """(first row in the slab, in the pool, rows) of each; empty where indexing is faster."""
        nbytes = slab.numel() * slab.element_size()
        if nbytes < _LONG_RUN_BYTES:
            return []
        breaks = (self.index.diff() != 1).nonzero().flatten() + 1
        count = len(breaks) + 1
        if nbytes < _LONG_RUN_BYTES * count:
            return []
        starts = [0, *breaks.tolist()]
        ends = [*starts[1:], len(self.index)]
        pool_rows = self.index[starts].tolist()
        return [(s, p, e - s) for s, p, e in zip(starts, pool_rows, ends, strict=True)]


def plane_rows(views: PlaneViews, section: Section, side: Side, *, by_token: bool = False) -> Rows:
    """As long as alignment allows: whole blocks (not if `by_token`), parts of them, tokens, or
    parts of a token where only some of its heads travel."""
    layers, _, held, dim = views.pool.shape
    heads, table = views.values.shape[2], side.tables[section.part.group]
    if heads == held:
        grain = 1 if by_token else gcd(side.block_size, section.start, section.tokens)
        index = row_index(table, section, side.block_size, grain)
        row_elements = grain * held * dim
    else:
        unit = gcd(held, heads, views.head)
        slots = row_index(table, section, side.block_size, 1)
        units = torch.arange(views.head // unit, (views.head + heads) // unit)
        index = (slots[:, None] * (held // unit) + units).flatten()
        row_elements = unit * dim
    pool = views.pool.view(layers, -1, row_elements)
    return Rows(pool=pool, index=index.to(pool.device))


def _widest_word(*tensors: torch.Tensor) -> torch.dtype:
    """In which both can be seen: every row starts and ends at a multiple of it."""
    common = max(_WORDS)
    for tensor in tensors:
        size = tensor.element_size()
        starts = (tensor.storage_offset(), tensor.stride(0), tensor.shape[2])
        common = gcd(common, tensor.data_ptr(), *(size * start for start in starts))
    return _WORDS[common]
