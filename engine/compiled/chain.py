"""A chain of operations over few rows, run in one call by torch's own threads. In the worker.

Also the places of a chain's values, and the effect of a graph's views on them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch
from torch.fx import Node

from engine.compiled.graph import TensorKind, is_call
from engine.compiled.library import ChainCall, ChainOps, Fused, Op

aten = torch.ops.aten


class Form(Enum):
    """The order of dimensions in a tensor of a step's rows."""

    ROWS = auto()  # [1, rows, width]
    HEADS = auto()  # [1, rows, heads, width]
    TURNED = auto()  # [1, heads, rows, width]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPlace:
    """`width` numbers of each head of each row, in a buffer; strides count numbers. Buffers below 0
    are inputs: -1 is the first."""

    buffer: int
    stride: int
    width: int
    offset: int = 0
    heads: int = 1
    head_stride: int = 0
    form: Form = Form.ROWS

    @property
    def is_rows(self) -> bool:
        return self.form is Form.ROWS

    def shape(self, rows: int) -> tuple[int, ...]:
        return self._arranged(rows, self.heads, self.width)

    def strides(self) -> tuple[int, ...]:
        return self._arranged(self.stride, self.head_stride, 1)

    def _arranged(self, rows: int, heads: int, width: int) -> tuple[int, ...]:
        match self.form:
            case Form.ROWS:
                return 1, rows, width
            case Form.HEADS:
                return 1, rows, heads, width
            case Form.TURNED:
                return 1, heads, rows, width


def viewed(place: BufferPlace, node: Node) -> BufferPlace | None:
    """The place of `node`'s result if its input is at `place`; None unless it is a mere view."""
    made = node.meta.get("kind")
    if not isinstance(made, TensorKind):
        return None
    if node.op == "call_method" and node.target == "narrow":
        return _narrowed(place, node)
    if is_call(node, aten.transpose.int) and set(node.args[1:]) == {1, 2}:
        return _turned(place)
    if is_call(node, aten.view.default) or is_call(node, aten.reshape.default):
        return _split(place, made) if place.is_rows else _joined(place, made)
    return None


def _narrowed(place: BufferPlace, node: Node) -> BufferPlace | None:
    _, dim, start, length = node.args
    if dim != -1 or not isinstance(start, int) or not isinstance(length, int):
        return None
    return replace(place, offset=place.offset + start, width=length)


def _turned(place: BufferPlace) -> BufferPlace | None:
    others = {Form.HEADS: Form.TURNED, Form.TURNED: Form.HEADS}
    return None if place.is_rows else replace(place, form=others[place.form])


def _split(place: BufferPlace, made: TensorKind) -> BufferPlace | None:
    if len(made.shape) != 4:
        return None
    one, _, heads, width = made.shape
    if one != 1 or not (isinstance(heads, int) and isinstance(width, int)):
        return None
    if heads * width != place.width:
        return None
    return replace(place, heads=heads, width=width, head_stride=width, form=Form.HEADS)


def _joined(place: BufferPlace, made: TensorKind) -> BufferPlace | None:
    whole = place.heads * place.width
    is_dense = place.form is Form.HEADS and place.head_stride == place.width
    if not is_dense or len(made.shape) != 3 or made.shape[2] != whole:
        return None
    return replace(place, width=whole, heads=1, head_stride=0, form=Form.ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`widths` are those of buffers; `outputs` are in them. `held` keeps alive what `ops` point
    at."""

    ops: Sequence[Op]
    inputs: int
    widths: Sequence[int]
    outputs: Sequence[BufferPlace]
    held: Sequence[object]


class Chain:
    """Called with its inputs, of which the first has the rows: `[1, rows, width]`."""

    def __init__(self, plan: Plan, fused: Fused) -> None:
        starts = [0] * plan.inputs
        end = 0
        for width in plan.widths:
            starts.append(end)
            end += width
        self._width = end
        self._ops = (Op * len(plan.ops))(*plan.ops)
        self._starts = (ctypes.c_int64 * len(starts))(*starts)
        self._chain = ChainOps(
            ctypes.addressof(self._ops), ctypes.addressof(self._starts), len(plan.ops), plan.inputs
        )
        self._address = ctypes.addressof(self._chain)
        self._pointers = ctypes.c_void_p * plan.inputs
        self._outputs = [
            (one, one.strides(), starts[plan.inputs + one.buffer]) for one in plan.outputs
        ]
        self._fused, self._held = fused, plan.held

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        dense = [one.contiguous() for one in inputs]
        rows = dense[0].shape[1]
        block = dense[0].new_empty(rows * self._width)
        pointers = self._pointers(*[one.data_ptr() for one in dense])
        call = ChainCall(
            self._address,
            ctypes.addressof(pointers),
            block.data_ptr(),
            self._fused.fork,
            rows,
            torch.get_num_threads(),
        )
        self._fused.run_chain(ctypes.addressof(call))
        return [
            block.as_strided(place.shape(rows), strides, rows * start + place.offset)
            for place, strides, start in self._outputs
        ]
