"""One step's indices as numpy arrays, without work per token in Python. Pure.

The flattened tokens hold the decode rows (slices of one token) first, then the chunks; each in the
batch's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.scoring import scored_rows
from engine.step import SequenceSlice
from kvpool.layout import KvLayout, Tables
from kvrelay.types import RequestKey

Ints = NDArray[np.integer]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupArrays:
    """One layer group's: each token's slot, all slices' blocks, and where each's begin."""

    slots: Int64s  # [tokens]
    tables: Int32s  # [blocks]
    table_starts: Int64s  # [slices]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """`order` is slice, as arranged here |-> slice of the batch; `rows`, `counts` and `starts` are
    each one's first row, tokens and position. The first `decodes` of them are of one token."""

    order: list[int]
    decodes: int
    token_ids: Int64s
    positions: Int64s
    logit_rows: Int64s  # as `engine.scoring` orders them
    rows: Int64s
    counts: Int64s
    starts: Int64s
    groups: tuple[GroupArrays, ...]


@dataclass(slots=True)
class TableCache:
    """Block tables of the last step as arrays: most of them stay as they are."""

    _held: dict[tuple[RequestKey, int], tuple[Tables, tuple[Int32s, ...]]] = field(
        default_factory=dict
    )

    def arrays(self, slices: Sequence[SequenceSlice]) -> list[tuple[Int32s, ...]]:
        """# slice |-> layer group |-> blocks"""
        fresh, found = {}, []
        for piece in slices:
            name = (piece.key, piece.choice)
            known = self._held.get(name)
            if known is None or known[0] != piece.tables:
                arrays = tuple(np.array(table, dtype=np.int32) for table in piece.tables)
                known = (piece.tables, arrays)
            fresh[name] = known
            found.append(known[1])
        self._held = fresh
        return found


def step_arrays(layout: KvLayout, slices: Sequence[SequenceSlice], cache: TableCache) -> StepArrays:
    lengths = [len(s.token_ids) for s in slices]
    order = sorted(range(len(slices)), key=lambda i: lengths[i] > 1)
    ordered = [slices[i] for i in order]
    counts = np.array([lengths[i] for i in order], dtype=np.int64)
    ends = np.cumsum(counts)
    starts = np.array([s.start for s in ordered], dtype=np.int64)
    owner = np.repeat(np.arange(len(ordered)), counts)
    positions = np.arange(int(ends[-1])) - (ends - counts - starts)[owner]
    last_rows = np.empty(len(slices), dtype=np.int64)
    last_rows[order] = ends - 1
    decodes = int((counts == 1).sum())
    tables = cache.arrays(ordered)
    return StepArrays(
        order=order,
        decodes=decodes,
        token_ids=np.array([t for s in ordered for t in s.token_ids], dtype=np.int64),
        positions=positions,
        logit_rows=_logit_rows(slices, last_rows, decodes),
        rows=ends - counts,
        counts=counts,
        starts=starts,
        groups=tuple(
            _group([t[g] for t in tables], owner, positions, layout.block_size)
            for g in range(len(layout.groups))
        ),
    )


def _logit_rows(slices: Sequence[SequenceSlice], last_rows: Int64s, decodes: int) -> Int64s:
    """A slice of one token that samples scores nothing."""
    rows: Int64s = last_rows[[i for i, s in enumerate(slices) if s.samples]]
    if decodes == len(slices) == len(rows):
        return rows
    scored = scored_rows(slices, last_rows)
    return np.concatenate([rows, np.array(scored)]) if scored else rows


def _group(tables: list[Int32s], owner: Int64s, positions: Int64s, size: int) -> GroupArrays:
    lengths = np.array([len(table) for table in tables])
    flat = np.concatenate(tables)
    starts = np.cumsum(lengths) - lengths
    blocks = flat[starts[owner] + positions // size].astype(np.int64)
    return GroupArrays(slots=blocks * size + positions % size, tables=flat, table_starts=starts)
