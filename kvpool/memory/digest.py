"""The digest of KV in a worker's own blocks, for the canary. Runs in the worker that owns them.

It finds each token's slot by itself, so that it doesn't repeat an error of collation or direct
reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from kvpool.core.layout.layout import BlockId, Tables
from kvpool.core.transfer.messages import SUMS, KvDigest, PlaneDigest, run_tokens
from kvpool.core.transfer.write import TokenSpan
from kvpool.memory.kv_memory import KvMemory

_TOKENS = 2**31
"""Signs of tokens come from numbers from here on, signs of a layer's elements from those below."""


@torch.inference_mode()
def digest(memory: KvMemory, tables: Tables, span: TokenSpan) -> tuple[KvDigest, ...]:
    """# copy of the heads |-> its digest"""
    return tuple(
        KvDigest(start=span.start, planes=tuple(_planes(memory, tables, span, copy)))
        for copy in range(memory.map.most_copies)
    )


def _planes(memory: KvMemory, tables: Tables, span: TokenSpan, copy: int) -> Iterator[PlaneDigest]:
    layout = memory.layout
    run = run_tokens(layout, span.tokens)
    for group, spec in enumerate(layout.groups):
        tokens = span.seen(spec.window)
        slots = _slots(tables[group], tokens, layout.block_size)
        for plane in range(len(spec.planes)):
            sums, squares = _by_token(memory, group, plane, copy, slots)
            yield _by_run(sums * _signs(_TOKENS + tokens.start, len(tokens), "cpu"), squares, run)


def _slots(table: Sequence[BlockId], tokens: range, block_size: int) -> torch.Tensor:
    """int64 `[tokens]`"""
    positions = torch.arange(tokens.start, tokens.stop)
    blocks = torch.tensor(table)[positions // block_size]
    assert len(tokens) == 0 or int(blocks.min()) >= 0, "a block that isn't held"
    return blocks * block_size + positions % block_size


def _by_token(
    memory: KvMemory, group: int, plane: int, copy: int, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums `[tokens, SUMS]` and squares `[tokens]` over all layers and heads."""
    sums, squares = torch.zeros(len(slots), SUMS), torch.zeros(len(slots))
    heads = memory.layout.groups[group].planes[plane].heads
    for share in memory.map.shares(group, plane, copy):
        pool = memory.parts[share.rank].planes[group][plane]
        here = slots.to(pool.device)
        own_sums, own_squares = (torch.zeros_like(t, device=pool.device) for t in (sums, squares))
        for layer, values in zip(share.layers, pool, strict=True):
            rows = _rows(values, here)
            first = (layer * heads + share.heads.start) * (rows.shape[1] // len(share.heads))
            signs = _signs(first, rows.shape[1], str(pool.device))
            own_sums += rows @ signs
            own_squares += rows.square().sum(dim=1)
        sums += own_sums.cpu()
        squares += own_squares.cpu()
    return sums, squares


def _rows(values: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """float32 `[tokens, heads x dim]` of one layer's `[slots, heads, dim]` of any dtype."""
    rows = values.flatten(1).view(torch.uint8).index_select(0, slots)
    return rows.view(values.dtype).float()


def _by_run(sums: torch.Tensor, squares: torch.Tensor, run: int) -> PlaneDigest:
    runs = torch.arange(len(sums)) // run
    count = -(-len(sums) // run)
    norms = torch.zeros(count).index_add_(0, runs, squares).sqrt()
    by_run = torch.zeros(count, SUMS).index_add_(0, runs, sums)
    return PlaneDigest(norms=tuple(norms.tolist()), sums=tuple(by_run.flatten().tolist()))


@lru_cache(maxsize=256)
def _signs(first: int, count: int, device: str) -> torch.Tensor:
    """float32 `[count, SUMS]`, 1 or -1: bits of a hash of the numbers from `first` on (lowbias32,
    Wellons 2018), the same on all machines."""
    mixed = torch.arange(first, first + count)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = ((mixed ^ mixed >> shift) * factor) & 0xFFFFFFFF
    bits = (mixed ^ mixed >> 16)[:, None] >> torch.arange(SUMS)
    return ((bits & 1) * 2 - 1).float().to(device)
