"""Attention over the paged KV memory in plain torch operations, and the backend of that name. Runs
in the worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.backend import GroupShape, Prepared
from engine.attention.torch_plan import ChunkPlan, DecodeBucket, GroupPlan, Planner, StepPlan
from engine.core.step import SequenceSlice
from engine.device.layer_marks import LayerMarks
from engine.model.interface import Scores
from kvpool.memory.kv_memory import KvMemory

_SCORES_BYTES = 64 << 20
"""The explicit score matrix is computed in pieces of at most this size."""


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """One step's attention: writes each layer's new KV into its slots, then attends.

    `places` is layer |-> (layer group, index in it).
    """

    memory: KvMemory
    plan: StepPlan
    places: dict[int, tuple[int, int]]
    marks: LayerMarks | None = None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        group, index = self.places[layer]
        plan = self.plan.groups[group]
        keys, values = self.memory.layer(group, index)
        fresh_k, fresh_v = key[0].transpose(0, 1), value[0].transpose(0, 1)
        keys.index_copy_(0, plan.slots, fresh_k)
        values.index_copy_(0, plan.slots, fresh_v)
        if self.marks is not None:
            self.marks.wrote(layer)
        paged = _Layer(keys, values, self.memory.layout.block_size, key[0], value[0], scores)
        return _join(_attend(paged, plan, query[0].transpose(0, 1)))


@dataclass(frozen=True, slots=True)
class _Layer:
    keys: torch.Tensor  # [slots, kv_heads, dim]
    values: torch.Tensor
    block_size: int
    fresh_keys: torch.Tensor  # [kv_heads, tokens, dim]
    fresh_values: torch.Tensor
    scores: Scores

    def gather(self, blocks: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks' keys and values, `[rows, kv_heads, slots, dim]` (strided views)."""
        return self._pick(self.keys, blocks, rows), self._pick(self.values, blocks, rows)

    def _pick(self, plane: torch.Tensor, blocks: torch.Tensor, rows: int) -> torch.Tensor:
        _, heads, dim = plane.shape
        picked = plane.view(-1, self.block_size * heads * dim).index_select(0, blocks)
        return picked.view(rows, -1, heads, dim).transpose(1, 2)


def _attend(layer: _Layer, plan: GroupPlan, query: torch.Tensor) -> list[torch.Tensor]:
    """`query` `[tokens, heads, dim]`; the parts `[tokens, heads, dim]` in row order."""
    decoded = [_decode(layer, bucket, query[bucket.start : bucket.stop]) for bucket in plan.buckets]
    chunks = [_chunk(layer, chunk, query[chunk.start : chunk.stop]) for chunk in plan.chunks]
    return decoded + chunks


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]


def _decode(layer: _Layer, bucket: DecodeBucket, query: torch.Tensor) -> torch.Tensor:
    rows, heads, dim = query.shape
    keys, values = layer.gather(bucket.blocks, rows)
    if layer.scores.is_plain and _prefers_diagonal(query, keys.shape[1]):
        return _decode_diagonal(query, keys, values, bucket.mask[:, 0], layer.scores.scaling)
    packed = query.view(rows, keys.shape[1], -1, dim)  # the heads of one KV head as its queries
    out = _weigh(packed, keys, values, bucket.mask, layer.scores, sinks_on_queries=True)
    return out.reshape(rows, heads, -1)


def _prefers_diagonal(query: torch.Tensor, kv_heads: int) -> bool:
    """On a CPU in 16 bits, SDPA takes twice as long for one query. The wasted work of the diagonal
    form grows with the KV heads; it is faster up to about this many."""
    return query.device.type == "cpu" and query.dtype != torch.float32 and kv_heads <= 4


def _decode_diagonal(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """All heads of a row as one matrix product, the queries on the diagonal of `[heads, kv_heads]`.

    `query` `[rows, heads, dim]`, `keys` `[rows, kv_heads, slots, dim]`, `mask` `[rows, 1, slots]`.
    """
    rows, heads, dim = query.shape
    kv_heads, slots = keys.shape[1:3]
    group = heads // kv_heads
    wide = query.new_zeros(rows, kv_heads, group, kv_heads, dim)
    wide.diagonal(dim1=1, dim2=3).copy_(query.view(rows, kv_heads, group, dim).permute(0, 2, 3, 1))
    flat_keys = keys.transpose(1, 2).reshape(rows, slots, kv_heads * dim)
    flat_values = values.transpose(1, 2).reshape(rows, slots, -1)
    logits = torch.bmm(wide.view(rows, heads, kv_heads * dim), flat_keys.transpose(1, 2))
    weights = torch.softmax(logits.float().mul_(scaling).add_(mask), dim=-1).to(values.dtype)
    out = torch.bmm(weights, flat_values).view(rows, kv_heads, group, kv_heads, -1)
    return out.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(rows, heads, -1)


def _chunk(layer: _Layer, chunk: ChunkPlan, query: torch.Tensor) -> torch.Tensor:
    tokens, heads, dim = query.shape
    if chunk.blocks is None:
        keys = layer.fresh_keys[None, :, chunk.start : chunk.stop]
        values = layer.fresh_values[None, :, chunk.start : chunk.stop]
    else:
        keys, values = layer.gather(chunk.blocks, 1)
    kv_heads = keys.shape[1]
    packed = query.transpose(0, 1).reshape(kv_heads, -1, tokens, dim)
    shared = (kv_heads, heads // kv_heads, -1, -1)
    keys, values = keys.transpose(0, 1).expand(shared), values.transpose(0, 1).expand(shared)
    out = _weigh(packed, keys, values, chunk.mask, layer.scores)  # [kv_heads, group, tokens, dim]
    return out.reshape(heads, tokens, -1).transpose(0, 1)


def _weigh(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scores: Scores,
    *,
    sinks_on_queries: bool = False,
) -> torch.Tensor:
    if scores.is_plain:
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scores.scaling
        )
    assert mask is not None
    return _explicit(query, keys, values, mask, scores, sinks_on_queries)


def _explicit(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scores: Scores,
    sinks_on_queries: bool,
) -> torch.Tensor:
    """Softmax attention with soft cap and sinks, a bounded number of queries at a time."""
    batch, heads, tokens, _ = query.shape
    sinks = _sink_column(scores.sinks, query, sinks_on_queries)
    step = max(1, _SCORES_BYTES // (4 * batch * heads * keys.shape[2]))
    step = tokens if sinks_on_queries else step
    parts = [
        _explicit_piece(
            query[:, :, i : i + step],
            keys,
            values,
            mask[..., i : i + step, :] if mask.shape[-2] > 1 else mask,
            scores,
            sinks,
        )
        for i in range(0, tokens, step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _explicit_piece(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scores: Scores,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    logits = torch.matmul(query, keys.transpose(2, 3)) * scores.scaling
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    logits = logits.float() + mask
    if sinks is not None:
        logits = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(logits, dim=-1).to(values.dtype)
    return torch.matmul(weights[..., : keys.shape[2]], values)


def _sink_column(
    sinks: torch.Tensor | None, query: torch.Tensor, on_queries: bool
) -> torch.Tensor | None:
    """`sinks` `[heads]` beside packed scores: heads are (KV head, query) or (batch, KV head)."""
    if sinks is None:
        return None
    if on_queries:
        return sinks.float().view(1, query.shape[1], query.shape[2], 1)
    return sinks.float().view(query.shape[0], query.shape[1], 1, 1)


class SdpaBackend:
    def __init__(
        self,
        memory: KvMemory,
        shapes: tuple[GroupShape, ...],
        places: Mapping[int, tuple[int, int]],
    ) -> None:
        self._memory, self._places = memory, dict(places)
        dtype = getattr(torch, memory.layout.dtype)
        needs_masks = any(shape.has_softcap or shape.has_sinks for shape in shapes)
        self._planner = Planner(memory.layout, memory.device, dtype, needs_masks)

    def prepare(self, slices: Sequence[SequenceSlice], marks: LayerMarks | None = None) -> Prepared:
        plan = self._planner.plan(slices)
        return Prepared(
            token_ids=plan.token_ids,
            positions=plan.positions,
            logit_rows=plan.logit_rows,
            state=PagedAttention(self._memory, plan, self._places, marks),
        )
