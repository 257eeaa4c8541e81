"""The inputs that every backend sends to the device for a step: the model's inputs and the new KV's
slots.

A step's indices are numpy arrays, made without work per token in Python. The flattened tokens hold
the decode rows (slices of one token) first, then the chunks; each in the batch's order. Named int32
arrays share one buffer, so that a step needs one copy to the device.

Libraries that follow block tables get each slice's blocks from the first that its window shows.
Positions only matter relative to the last token, so earlier blocks may be left out.

The write of a layer's new KV into its slots begins every layer's attention, and then the layer's
mark is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.backend import Prepared
from engine.core.step import SequenceSlice, scored_rows
from engine.device.layer_marks import LayerMarks
from engine.model.interface import AttentionState
from kvpool.core.layout.layout import KvLayout, Tables
from kvpool.memory.kv_memory import KvMemory

Ints = NDArray[np.integer]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Arrays = tuple[Int32s, ...]
"""# layer group |-> blocks"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupArrays:
    """One layer group: each token's slot, all slices' blocks, and where the blocks of each
    begin."""

    slots: Int64s  # [tokens]
    tables: Int32s  # [blocks]
    table_starts: Int64s  # [slices]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """`order`: # slice, as arranged here |-> slice of the batch. `rows`, `counts` and `starts` are
    the first row, tokens and position of each. The first `decodes` slices have one token."""

    order: list[int]
    decodes: int
    token_ids: Int64s
    positions: Int64s
    logit_rows: Int64s  # as `engine.core.step` orders them
    rows: Int64s
    counts: Int64s
    starts: Int64s
    groups: tuple[GroupArrays, ...]


@dataclass(slots=True)
class TableCache:
    """The last step's block tables as arrays. Most have not changed since, and are the same
    objects."""

    _held: dict[int, tuple[Tables, Arrays]] = field(default_factory=dict)  # by the tables' id

    def arrays(self, slices: Sequence[SequenceSlice]) -> list[Arrays]:
        """# slice |-> layer group |-> blocks"""
        held = self._held
        found = [held.get(id(piece.tables)) or _as_arrays(piece.tables) for piece in slices]
        self._held = {id(one[0]): one for one in found}
        return [arrays for _, arrays in found]


def _as_arrays(tables: Tables) -> tuple[Tables, Arrays]:
    return tables, tuple([np.array(table, dtype=np.int32) for table in tables])


def step_arrays(layout: KvLayout, slices: Sequence[SequenceSlice], cache: TableCache) -> StepArrays:
    lengths = [len(s.token_ids) for s in slices]
    decodes, order, ordered = lengths.count(1), [*range(len(slices))], slices
    if decodes != len(slices):
        order.sort(key=lambda i: lengths[i] > 1)
        ordered = [slices[i] for i in order]
        lengths = [lengths[i] for i in order]
    counts = np.array(lengths, dtype=np.int64)
    starts = np.array([s.start for s in ordered], dtype=np.int64)
    rows, owner, positions = _spread(counts, starts)
    tables = cache.arrays(ordered)
    return StepArrays(
        order=order,
        decodes=decodes,
        token_ids=np.array([*chain.from_iterable([s.token_ids for s in ordered])], dtype=np.int64),
        positions=positions,
        logit_rows=_logit_rows(slices, order, rows + counts - 1, decodes),
        rows=rows,
        counts=counts,
        starts=starts,
        groups=tuple(
            [
                _group(of_group, owner, positions, layout.block_size)
                for of_group in zip(*tables, strict=True)
            ]
        ),
    )


def _spread(counts: Int64s, starts: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """The first row of each slice, and the slice and the position of each token."""
    each = np.arange(len(counts))
    ends = counts.cumsum()
    if ends[-1] == len(each):
        return each, each, starts
    rows, owner = ends - counts, each.repeat(counts)
    return rows, owner, np.arange(int(ends[-1])) - (rows - starts)[owner]


def _logit_rows(
    slices: Sequence[SequenceSlice], order: list[int], last_rows: Int64s, decodes: int
) -> Int64s:
    """`last_rows` in this order. A slice of one token that samples scores no token."""
    samples = [i for i, s in enumerate(slices) if s.samples]
    if decodes == len(slices) == len(samples):
        return last_rows
    by_slice = np.empty_like(last_rows)
    by_slice[order] = last_rows
    rows: Int64s = by_slice[samples]
    scored = scored_rows(slices, by_slice)
    return np.concatenate([rows, np.array(scored)]) if scored else rows


def _group(tables: Arrays, owner: Int64s, positions: Int64s, size: int) -> GroupArrays:
    lengths = np.array([*map(len, tables)])
    flat = np.concatenate(tables)
    starts = lengths.cumsum() - lengths
    blocks = flat[starts[owner] + positions // size].astype(np.int64)
    return GroupArrays(slots=blocks * size + positions % size, tables=flat, table_starts=starts)


_ALIGNED = 4
"""In elements: arrays begin at multiples of 16 bytes, so that kernels can load whole vectors."""


_NO_FILLING: Mapping[str, int] = {}


class StepPacking:
    """`shapes` are the largest sizes of each array; the last array may be sent in part."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(shapes)
        self._sizes = {name: prod(shape) for name, shape in shapes.items()}
        self._begins: dict[str, int] = {}
        self.elements = 0
        for name, size in self._sizes.items():
            self._begins[name] = self.elements
            self.elements += -(-size // _ALIGNED) * _ALIGNED

    def pack(
        self, arrays: Mapping[str, Ints], *, pinned: bool, filling: Mapping[str, int] = _NO_FILLING
    ) -> torch.Tensor:
        """The buffer to send. Elements that an array doesn't fill get its `filling`; without one
        they are undefined."""
        last = next(reversed(self._shapes))
        used = self._begins[last] + arrays[last].size
        host = torch.empty(used, dtype=torch.int32, pin_memory=pinned)
        flat = host.numpy()
        for name, array in arrays.items():
            begin, most = self._begins[name], self._sizes[name]
            assert array.size <= most, (name, array.shape)
            flat[begin : begin + array.size] = array.ravel()
            if name in filling:
                flat[begin + array.size : begin + most] = filling[name]
        return host

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays in a buffer made by `pack`."""
        return {
            name: flat[begin : begin + self._sizes[name]].view(self._shapes[name])
            for name, begin in self._begins.items()
        }


@dataclass(frozen=True, slots=True)
class Inputs:
    """int32 tensors by name, sent in one copy."""

    views: Mapping[str, torch.Tensor]

    @property
    def slots(self) -> list[torch.Tensor]:
        """# layer group |-> slots of the new tokens"""
        return [view for name, view in self.views.items() if name.endswith(".slots")]

    def prepared(self, state: AttentionState, rows: int | None = None) -> Prepared:
        """`rows`: only the first of them."""
        return Prepared(
            token_ids=self.views["token_ids"][None, :rows].long(),
            positions=self.views["positions"][None, :rows].long(),
            logit_rows=self.views["logit_rows"][:rows].long(),
            state=state,
        )


@dataclass(slots=True)
class Named:
    """The arrays to send."""

    arrays: dict[str, Ints] = field(default_factory=dict)

    @classmethod
    def of(cls, step: StepArrays) -> Named:
        arrays = [step.token_ids, step.positions, step.logit_rows]
        arrays += [group.slots for group in step.groups]
        return cls(dict(zip(cls.inputs(len(step.groups)), arrays, strict=True)))

    @staticmethod
    def inputs(groups: int) -> list[str]:
        """The inputs with the names that `of` returns."""
        return ["token_ids", "positions", "logit_rows", *(f"{g}.slots" for g in range(groups))]

    def send(self, device: torch.device) -> Inputs:
        packing = StepPacking({name: array.shape for name, array in self.arrays.items()})
        host = packing.pack(self.arrays, pinned=device.type == "cuda")
        return Inputs(packing.views(host.to(device, non_blocking=True)))


def blocks_view(plane: torch.Tensor, block_size: int) -> torch.Tensor:
    """`[slots, heads, dim]` as `[blocks, block_size, heads, dim]`."""
    return plane.view(-1, block_size, *plane.shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """One layer group's view of the step, as in `StepArrays`' order of slices."""

    blocks: Ints  # [all blocks]
    counts: Ints  # [slices], blocks
    tokens: Ints  # [slices], from the first visible block's first token on

    def table(self) -> Ints:
        """`[slices, most blocks]`, padded by block 0."""
        padded = np.zeros((len(self.counts), int(self.counts.max())), dtype=np.int32)
        padded[np.arange(padded.shape[1]) < self.counts[:, None]] = self.blocks
        return padded


def visible(layout: KvLayout, group: int, step: StepArrays) -> Visible:
    size, window = layout.block_size, layout.groups[group].window
    first = np.zeros_like(step.starts)
    if window is not None:
        first = np.maximum(0, step.starts - window + 1) // size
    tokens = step.starts + step.counts - first * size
    counts = -(-tokens // size)
    begins = step.groups[group].table_starts + first
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    blocks = step.groups[group].tables[np.repeat(begins, counts) + within]
    return Visible(blocks=blocks, counts=counts, tokens=tokens)


def starts_of(counts: Ints) -> Ints:
    """The start of each run, and the end of the last one."""
    return np.concatenate([[0], np.cumsum(counts)])


_StoreKv = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""New keys and values `[kv_heads, tokens, dim]`, the layer's planes, slots int32 `[tokens]`."""


@dataclass(frozen=True, slots=True)
class LayerKv:
    """A layer's planes `[slots, kv_heads, dim]`, with the KV of this step."""

    group: int
    keys: torch.Tensor
    values: torch.Tensor
    block_size: int

    @property
    def blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The planes as `[blocks, block_size, kv_heads, dim]`."""
        return blocks_view(self.keys, self.block_size), blocks_view(self.values, self.block_size)


@dataclass(frozen=True, slots=True)
class KvWriter:
    """Writes one step's KV. `places` is layer |-> (layer group, index in it), `slots` the
    groups'."""

    memory: KvMemory
    places: Mapping[int, tuple[int, int]]
    slots: Sequence[torch.Tensor]
    marks: LayerMarks | None
    store: _StoreKv

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> LayerKv:
        """`key`, `value` as in `AttentionState.attend`."""
        held = self.planes(layer)
        self.store(key[0], value[0], held.keys, held.values, self.slots[held.group])
        self.wrote(layer)
        return held

    def planes(self, layer: int) -> LayerKv:
        group, index = self.places[layer]
        keys, values = self.memory.layer(group, index)
        return LayerKv(group, keys, values, self.memory.layout.block_size)

    def wrote(self, layer: int) -> None:
        """The step's KV is in the layer's planes, or will be once the stream gets there."""
        if self.marks is not None:
            self.marks.wrote(layer)
