"""Index tensors and masks of one step, prepared once for all its layers. Runs in the worker.

The flattened tokens hold the decode rows (slices of one token) first, then the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.core.step import SequenceSlice, scored_rows
from kvpool.core.layout.layout import KvLayout

_Ints = NDArray[np.int64]

_WASTE = 1.5
"""A decode bucket's longest sequence is at most this many times its shortest."""
_SHORT_BLOCKS = 8
"""Sequences this short share a bucket, whatever their ratio: a call costs more than the padding."""
GATHER_BYTES = 256 << 20
"""A bucket of several rows gathers at most this much of one layer's KV."""


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Decode rows of similar length, attended by one call."""

    start: int  # first row
    stop: int
    blocks: torch.Tensor  # [rows * blocks], padded by block 0
    mask: torch.Tensor  # [rows, 1, 1, slots], additive


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Consecutive tokens of one sequence. `blocks` None: nothing cached is seen, `mask` None:
    plain causal among the chunk's own tokens."""

    start: int  # first row
    stop: int
    blocks: torch.Tensor | None  # [blocks]
    mask: torch.Tensor | None  # [tokens, slots or tokens], additive


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One layer group's view of the step."""

    slots: torch.Tensor  # [tokens], where each token's KV goes
    buckets: tuple[DecodeBucket, ...]
    chunks: tuple[ChunkPlan, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    token_ids: torch.Tensor  # [1, tokens]
    positions: torch.Tensor  # [1, tokens]
    logit_rows: torch.Tensor  # [rows], as `engine.core.step` orders them
    groups: tuple[GroupPlan, ...]


@dataclass(frozen=True, slots=True)
class Planner:
    """`needs_masks`: some layer can't use the causal flag (soft cap, sinks)."""

    layout: KvLayout
    device: torch.device
    dtype: torch.dtype
    needs_masks: bool = False

    def plan(self, slices: Sequence[SequenceSlice]) -> StepPlan:
        order = sorted(range(len(slices)), key=lambda i: _row_order(slices[i]))
        ordered = [slices[i] for i in order]
        last_rows = [row for _, row in sorted(zip(order, _last_rows(ordered), strict=True))]
        positions = [np.arange(s.start, _end(s)) for s in ordered]
        return StepPlan(
            token_ids=self._index([t for s in ordered for t in s.token_ids])[None],
            positions=self._index(np.concatenate(positions))[None],
            logit_rows=self._index(
                [last_rows[i] for i, s in enumerate(slices) if s.samples]
                + scored_rows(slices, last_rows)
            ),
            groups=tuple(
                self._group(g, ordered, positions) for g in range(len(self.layout.groups))
            ),
        )

    def _index(self, values: Sequence[int] | _Ints) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64)).to(self.device)

    def _group(self, group: int, ordered: list[SequenceSlice], positions: list[_Ints]) -> GroupPlan:
        size, window = self.layout.block_size, self.layout.groups[group].window
        tables = [np.asarray(s.tables[group], dtype=np.int64) for s in ordered]
        slots = [t[p // size] * size + p % size for t, p in zip(tables, positions, strict=True)]
        decodes = sum(len(s.token_ids) == 1 for s in ordered)
        return GroupPlan(
            slots=self._index(np.concatenate(slots)),
            buckets=self._buckets(group, tables, [_end(s) for s in ordered[:decodes]]),
            chunks=self._chunks(tables, ordered, decodes, window),
        )

    def _buckets(
        self, group: int, tables: list[_Ints], ends: list[int]
    ) -> tuple[DecodeBucket, ...]:
        window = self.layout.groups[group].window
        firsts = [_first_block(end - 1, window, self.layout.block_size) for end in ends]
        counts = [self.layout.blocks_for(end) - f for end, f in zip(ends, firsts, strict=True)]
        block_bytes = layer_block_bytes(self.layout, group)
        return tuple(
            self._bucket(start, tables[start:stop], ends[start:stop], firsts[start:stop], window)
            for start, stop in _runs(counts, GATHER_BYTES // block_bytes)
        )

    def _bucket(
        self,
        start: int,
        tables: list[_Ints],
        ends: list[int],
        firsts: list[int],
        window: int | None,
    ) -> DecodeBucket:
        size = self.layout.block_size
        seen = [
            t[f : self.layout.blocks_for(end)]
            for t, f, end in zip(tables, firsts, ends, strict=True)
        ]
        blocks = np.zeros((len(seen), max(map(len, seen))), dtype=np.int64)
        for row, ids in zip(blocks, seen, strict=True):
            row[: len(ids)] = ids
        keys = np.asarray(firsts)[:, None] * size + np.arange(blocks.shape[1] * size)
        mask = self._mask(np.asarray(ends)[:, None] - 1, keys, window)
        return DecodeBucket(
            start, start + len(seen), self._index(blocks.ravel()), mask[:, None, None]
        )

    def _chunks(
        self,
        tables: list[_Ints],
        ordered: list[SequenceSlice],
        decodes: int,
        window: int | None,
    ) -> tuple[ChunkPlan, ...]:
        row, chunks = decodes, []
        for table, piece in zip(tables[decodes:], ordered[decodes:], strict=True):
            chunks.append(self._chunk(row, table, piece, window))
            row += len(piece.token_ids)
        return tuple(chunks)

    def _chunk(self, row: int, table: _Ints, piece: SequenceSlice, window: int | None) -> ChunkPlan:
        size, tokens, end = self.layout.block_size, len(piece.token_ids), _end(piece)
        queries = np.arange(piece.start, end)[:, None]
        if piece.start == 0:
            masked = self.needs_masks or (window is not None and window < tokens)
            mask = self._mask(queries, queries.T, window) if masked else None
            return ChunkPlan(row, row + tokens, None, mask)
        first, last = _first_block(piece.start, window, size), self.layout.blocks_for(end)
        mask = self._mask(queries, np.arange(first * size, last * size)[None], window)
        return ChunkPlan(row, row + tokens, self._index(table[first:last]), mask)

    def _mask(self, queries: _Ints, keys: _Ints, window: int | None) -> torch.Tensor:
        """Additive, 0 where the key's position is seen from the query's, else minus infinity."""
        near, far = (
            torch.from_numpy(queries).to(self.device),
            torch.from_numpy(keys).to(self.device),
        )
        hidden = far > near
        if window is not None:
            hidden |= far <= near - window
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(hidden, float("-inf"))


def layer_block_bytes(layout: KvLayout, group: int) -> int:
    """One block of one layer, all planes."""
    per_token = sum(plane.elements for plane in layout.groups[group].planes)
    return per_token * layout.block_size * layout.element_bytes


def _end(piece: SequenceSlice) -> int:
    return piece.start + len(piece.token_ids)


def _row_order(piece: SequenceSlice) -> tuple[bool, int]:
    """Decode rows first, by length, so that neighbours share a bucket."""
    is_chunk = len(piece.token_ids) > 1
    return is_chunk, 0 if is_chunk else piece.start


def _last_rows(ordered: list[SequenceSlice]) -> list[int]:
    return [int(n) - 1 for n in np.cumsum([len(s.token_ids) for s in ordered])]


def _first_block(position: int, window: int | None, size: int) -> int:
    """The first block that the query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1) // size


def _runs(counts: list[int], limit_blocks: int) -> list[tuple[int, int]]:
    """Cut ascending block counts into `[start, stop)` runs that waste little padding and hold at
    most `limit_blocks` blocks (or one row)."""
    runs: list[tuple[int, int]] = []
    start = 0
    for i, count in enumerate(counts):
        wasteful = count > max(_SHORT_BLOCKS, _WASTE * counts[start])
        if wasteful or ((i - start + 1) * count > limit_blocks and i > start):
            runs.append((start, i))
            start = i
    return [*runs, (start, len(counts))] if counts else []
