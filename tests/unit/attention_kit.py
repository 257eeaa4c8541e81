"""Random paged batches for the attention kernels, and plain attention to compare with."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.attention.triton.work import QueryTiles, divide, query_tiles
from engine.model.interface import Scores


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Slice i has `counts[i]` tokens behind `cached[i]` others."""

    counts: tuple[int, ...]
    cached: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    scores: Scores
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    block_size: int = 16
    seed: int = 0
    device: str = "cpu"
    blocks: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Blocks in no order; some lie outside the window and are not held any more."""
        lengths = [c + p for c, p in zip(self.counts, self.cached, strict=True)]
        needed = [-(-length // self.block_size) for length in lengths]
        order = np.random.default_rng(self.seed).permutation(sum(needed) + 3).tolist()
        for count in needed:
            self.blocks.append([order.pop() for _ in range(count)])
        for ids, cached in zip(self.blocks, self.cached, strict=True):
            if self.scores.window is not None:
                gone = max(0, cached - self.scores.window + 1) // self.block_size
                ids[:gone] = [-1] * gone

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    def random(self, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + sum(shape))
        return torch.randn(shape, generator=generator).to(self.dtype).to(self.device)

    def planes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots that no one owns, and those behind the last token, are NaN."""
        slots = (sum(map(len, self.blocks)) + 3) * self.block_size
        planes = [self.random(slots, self.kv_heads, d) for d in (self.dim, self.value_dim)]
        unused = torch.ones(slots, dtype=torch.bool)
        for slice_, count in enumerate(self.counts):
            unused[self.slots(slice_, self.first(slice_), self.cached[slice_] + count)] = False
        for plane in planes:
            plane[unused.to(self.device)] = float("nan")
        keys, values = (plane.to(self.kv_dtype or self.dtype) for plane in planes)
        return keys, values

    def first(self, slice_: int) -> int:
        window = self.scores.window
        return 0 if window is None else max(0, self.cached[slice_] - window + 1)

    def slots(self, slice_: int, start: int, end: int) -> torch.Tensor:
        at = np.arange(start, end)
        blocks = np.asarray(self.blocks[slice_])[at // self.block_size]
        return torch.from_numpy(blocks * self.block_size + at % self.block_size)

    def tiles(self, tile_tokens: int) -> QueryTiles:
        counts = np.array(self.counts)
        blocks = np.array([len(b) for b in self.blocks])
        return query_tiles(
            rows=np.cumsum(counts) - counts,
            counts=counts,
            positions=np.array(self.cached),
            tables=np.cumsum(blocks) - blocks,
            tile_tokens=tile_tokens,
            window=self.scores.window,
        )

    def work(self, *, tile_tokens: int, programs: int, key_tile: int) -> dict[str, torch.Tensor]:
        """The tensors of a DeviceWork."""
        tiles = self.tiles(tile_tokens)
        work = divide(tiles, kv_heads=self.kv_heads, programs=programs, key_tile=key_tile)
        flat = np.array([b for ids in self.blocks for b in ids], dtype=np.int32)
        arrays = {
            "queries": tiles.rows,
            "pieces": work.pieces,
            "starts": work.starts,
            "joins": work.joins,
            "tables": flat,
        }
        return {name: torch.from_numpy(a).to(self.device) for name, a in arrays.items()}


def plain_attention(
    batch: Batch, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Slice by slice, in fp64: `[tokens, heads, value_dim]`."""
    rows = query.double().cpu().split(batch.counts)
    return torch.cat([_attend(batch, i, q, keys, values) for i, q in enumerate(rows)])


def _attend(
    batch: Batch, slice_: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    first, start = batch.first(slice_), batch.cached[slice_]
    slots = batch.slots(slice_, first, start + batch.counts[slice_])
    group = batch.heads // batch.kv_heads
    key, value = (p.cpu().double()[slots].repeat_interleave(group, 1) for p in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, key) * batch.scores.scaling
    if batch.scores.softcap is not None:
        scores = batch.scores.softcap * torch.tanh(scores / batch.scores.softcap)
    asking = torch.arange(start, start + len(query))[:, None]
    seen = torch.arange(first, start + len(query))[None]
    hidden = seen > asking
    if batch.scores.window is not None:
        hidden |= seen <= asking - batch.scores.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if batch.scores.sinks is not None:
        sinks = batch.scores.sinks.double().cpu()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, sinks], dim=2)
    weights = torch.softmax(scores, dim=2)[..., : key.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, value)
