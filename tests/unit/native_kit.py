"""Random ragged batches over paged KV for the CPU kernel, and what attention is by definition."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from engine.attention.inputs import StepArrays, TableCache, step_arrays
from engine.attention.native.kernel import Kernel, Layers
from engine.core.step import SequenceSlice
from engine.model.interface import Scores
from kvpool.core.layout.layout import NO_BLOCK, BlockId, KvLayout, LayerGroup, Plane
from kvrelay.types import RequestKey

Slices = tuple[tuple[int, int], ...]
"""# (tokens that are cached, tokens that are new)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    query: int
    kv: int
    dim: int
    value_dim: int


@dataclass(slots=True)
class Batch:
    """`texts` are each slice's keys and values in order, `[tokens, kv_heads, dim]`. Slots that hold
    no token of theirs are NaN, and so is what they are to receive."""

    layout: KvLayout
    slices: Slices
    step: StepArrays
    planes: tuple[torch.Tensor, torch.Tensor]
    query: torch.Tensor  # [tokens, heads, dim]
    texts: list[tuple[torch.Tensor, torch.Tensor]]

    def attend(self, kernel: Kernel, scores: Scores) -> torch.Tensor:
        """`[tokens, heads, value_dim]`, by the kernel."""
        fresh = [
            torch.cat([text[i][cached:] for text, (cached, _) in self._by_slice()])
            for i in range(2)
        ]
        asked, key, value = (t.transpose(0, 1)[None] for t in (self.query, *fresh))
        layers = Layers(kernel, self.layout, 0, self.step)
        return layers.attend(*self.planes, asked, key, value, scores)[0]

    def expect(self, scores: Scores) -> torch.Tensor:
        """The same in fp64, from the definition."""
        rows = self.query.double().split([new for _, (_, new) in self._by_slice()])
        window = self.layout.groups[0].window
        return torch.cat(
            [
                _attention(asked, keys.double(), values.double(), cached, scores, window)
                for asked, ((keys, values), (cached, _)) in zip(rows, self._by_slice(), strict=True)
            ]
        )

    def _by_slice(self) -> list[tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, int]]]:
        return [(self.texts[i], self.slices[i]) for i in self.step.order]


def make_batch(
    slices: Slices,
    heads: Heads,
    *,
    block_size: int = 16,
    dtype: str = "float32",
    window: int | None = None,
    seed: int = 0,
) -> Batch:
    planes = (
        Plane(name="k", heads=heads.kv, dim=heads.dim),
        Plane(name="v", heads=heads.kv, dim=heads.value_dim),
    )
    group = LayerGroup(layers=(0,), planes=planes, window=window)
    layout = KvLayout(groups=(group,), dtype=dtype, block_size=block_size)
    tables = _tables(layout, slices, seed)
    pieces = [_piece(i, *s, table) for i, (s, table) in enumerate(zip(slices, tables, strict=True))]
    step = step_arrays(layout, pieces, TableCache())
    draw = _Draw(torch.Generator().manual_seed(seed), getattr(torch, dtype))
    texts = [
        (draw(sum(s), heads.kv, heads.dim), draw(sum(s), heads.kv, heads.value_dim)) for s in slices
    ]
    slots = (max(b for table in tables for b in table) + 1) * block_size
    memory = tuple(
        torch.full((slots, p.heads, p.dim), float("nan"), dtype=draw.dtype) for p in planes
    )
    for (cached, _), table, text in zip(slices, tables, texts, strict=True):
        places = [table[i // block_size] * block_size + i % block_size for i in range(cached)]
        seen = [i for i, place in enumerate(places) if place >= 0]
        for plane, source in zip(memory, text, strict=True):
            plane[[places[i] for i in seen]] = source[:cached][seen]
    query = draw(sum(new for _, new in slices), heads.query, heads.dim)
    return Batch(layout, slices, step, (memory[0], memory[1]), query, texts)


@dataclass(frozen=True, slots=True)
class _Draw:
    generator: torch.Generator
    dtype: torch.dtype

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)


def _tables(layout: KvLayout, slices: Slices, seed: int) -> list[tuple[BlockId, ...]]:
    """In no order; blocks that a window has left behind are not held."""
    counts = [layout.blocks_for(sum(s)) for s in slices]
    ids = list(range(sum(counts)))
    random.Random(seed).shuffle(ids)
    tables = []
    for (cached, _), count in zip(slices, counts, strict=True):
        first = layout.groups[0].first_block(cached, layout.block_size)
        held = [BlockId(ids.pop()) for _ in range(count)]
        tables.append((*[NO_BLOCK] * first, *held[first:]))
    return tables


def _piece(i: int, cached: int, new: int, table: tuple[BlockId, ...]) -> SequenceSlice:
    return SequenceSlice(
        key=RequestKey(str(i), 0),
        choice=0,
        token_ids=tuple(range(new)),
        start=cached,
        tables=(table,),
    )


def _attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cached: int,
    scores: Scores,
    window: int | None,
) -> torch.Tensor:
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", query, keys) * scores.scaling
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    near = torch.arange(cached, len(keys))[:, None]
    far = torch.arange(len(keys))[None]
    hidden = (far > near) | (far <= near - (window or len(keys)))
    logits = logits.masked_fill(hidden, float("-inf"))
    if scores.sinks is not None:
        column = scores.sinks.double()[:, None, None].expand(*logits.shape[:2], 1)
        logits = torch.cat([logits, column], dim=2)
    weights = torch.softmax(logits, dim=2)[:, :, : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values)
