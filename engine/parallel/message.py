"""The message that tells a rank one step: whole numbers in one buffer. Pure.

[slices, groups, kind, changed | for each slice: row, tokens, start, flags, scored | for each
slice whose tables changed, for each group: blocks kept, new blocks | all tokens | all new blocks)

A *row* is a place where both sides keep the block tables of one sequence. So only new blocks are
sent: mostly none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.core.step import SampleRequest, Scoring, SequenceSlice
from kvpool.core.layout.layout import BlockId, Tables
from kvrelay.types import RequestKey, Sampling

_HEAD = 4
_FACTS = 5
_SAMPLES, _CHANGED = 1, 2  # flags
_SPARE_ROWS = 256
"""Sequences remembered beyond those of a step: those of the other role's steps."""
_SAMPLE = SampleRequest(
    sampling=Sampling(max_tokens=1, seed=0), choice=0, prompt_ids=(), emitted_ids=()
)

_LONG, _FOLLOWS, _RECORDED = 1, 2, 4  # of a step's kind
_Name = tuple[RequestKey, int]
_Int32s = NDArray[np.int32]


class StepKind(NamedTuple):
    """`is_long`: of LongRoPE. `follows`: its slices have the tokens that the step before draws,
    which rank 0 gives to the others. `is_recorded`: all ranks replay it."""

    is_long: bool = False
    follows: bool = False
    is_recorded: bool = False

    def packed(self) -> int:
        return _LONG * self.is_long | _FOLLOWS * self.follows | _RECORDED * self.is_recorded

    @staticmethod
    def of(packed: int) -> StepKind:
        return StepKind(bool(packed & _LONG), bool(packed & _FOLLOWS), bool(packed & _RECORDED))


class StepTeller:
    """Rank 0's side. Its messages must reach the others in order."""

    def __init__(self) -> None:
        self._told: OrderedDict[_Name, tuple[int, Tables]] = OrderedDict()  # the last used last
        self._free: list[int] = []
        self._rows = 0

    def encode(self, slices: Sequence[SequenceSlice], kind: StepKind) -> bytes:
        """The input of the forward pass, without sampling and owners."""
        facts: list[int] = []
        changes: list[int] = []
        tokens: list[int] = []
        blocks: list[int] = []
        for piece in slices:
            row, known = self._row(piece)
            flags = _SAMPLES if piece.samples else 0
            if known != piece.tables:
                flags |= _CHANGED
                for table, old in zip(piece.tables, known or _nothing(piece), strict=True):
                    kept = len(old) if table[: len(old)] == old else 0
                    changes += (kept, len(table) - kept)
                    blocks += table[kept:]
            scored = 0 if piece.scoring is None else len(piece.scoring.next_ids)
            facts += (row, len(piece.token_ids), piece.start, flags, scored)
            tokens += piece.token_ids
        self._forget(len(slices))
        groups = len(slices[0].tables)
        head = (len(slices), groups, kind.packed(), len(changes) // (2 * groups))
        numbers = (*head, *facts, *changes, *tokens, *blocks)
        return pack(f"={len(numbers)}i", *numbers)  # a quarter of what an array takes

    def _row(self, piece: SequenceSlice) -> tuple[int, Tables | None]:
        """The row of the sequence, and the tables known there; None: those of another sequence."""
        name = (piece.key, piece.choice)
        row, known = self._told.get(name) or (self._new_row(), None)
        if known is not piece.tables:
            self._told[name] = row, piece.tables
        self._told.move_to_end(name)
        return row, known

    def _new_row(self) -> int:
        if self._free:
            return self._free.pop()
        self._rows += 1
        return self._rows - 1

    def _forget(self, slices: int) -> None:
        while len(self._told) > slices + _SPARE_ROWS:
            _, (row, _) = self._told.popitem(last=False)
            self._free.append(row)


def _nothing(piece: SequenceSlice) -> Tables:
    return ((),) * len(piece.tables)


@dataclass(slots=True)
class _Row:
    """`tables` are the same objects as long as they don't change."""

    key: RequestKey
    tables: Tables = ()

    def change(self, kept: Sequence[int], told: Sequence[tuple[int, ...]]) -> None:
        old = self.tables or ((),) * len(kept)
        self.tables = tuple(
            before[:count] + tuple(map(BlockId, new))
            for before, count, new in zip(old, kept, told, strict=True)
        )

    def slice(
        self, start: int, token_ids: tuple[int, ...], *, samples: bool, scored: int
    ) -> SequenceSlice:
        return SequenceSlice(
            key=self.key,
            choice=0,
            token_ids=token_ids,
            start=start,
            tables=self.tables,
            samples=(_SAMPLE,) if samples else (),
            scoring=Scoring(next_ids=(0,) * scored) if scored else None,
        )


class StepHearer:
    """Another rank's side."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []

    def decode(self, payload: bytes) -> tuple[list[SequenceSlice], StepKind]:
        numbers = np.frombuffer(payload, dtype=np.int32)
        count, groups, kind, changed = (int(n) for n in numbers[:_HEAD])
        middle = _HEAD + count * _FACTS
        body = middle + changed * 2 * groups
        facts = numbers[_HEAD:middle].reshape(count, _FACTS)
        changes = numbers[middle:body].reshape(changed, groups, 2)
        tokens = _cut(numbers[body:], facts[:, 1])
        told = _cut(numbers[body + int(facts[:, 1].sum()) :], changes[:, :, 1].ravel())
        by_slice = [told[i : i + groups] for i in range(0, len(told), groups)]
        news = zip(changes[:, :, 0].tolist(), by_slice, strict=True)
        slices = []
        for (row, _, start, flags, scored), token_ids in zip(facts.tolist(), tokens, strict=True):
            held = self._row(row)
            if flags & _CHANGED:
                held.change(*next(news))
            samples = bool(flags & _SAMPLES)
            slices.append(held.slice(start, token_ids, samples=samples, scored=scored))
        return slices, StepKind.of(kind)

    def _row(self, row: int) -> _Row:
        while len(self._rows) <= row:
            self._rows.append(_Row(RequestKey(str(len(self._rows)), 0)))
        return self._rows[row]


def _cut(numbers: _Int32s, lengths: _Int32s) -> list[tuple[int, ...]]:
    flat, ends = numbers.tolist(), np.cumsum(lengths).tolist()
    return [
        tuple(flat[end - length : end]) for end, length in zip(ends, lengths.tolist(), strict=True)
    ]
