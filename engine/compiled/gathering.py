"""Gathers the operations of one chain in the order of their graph, with the places of their values:
inputs, the chain's own buffers, and outputs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from engine.compiled.chain import BufferPlace, Plan, viewed
from engine.compiled.graph import Captured, TensorKind
from engine.compiled.library import MOST_OPS, Fused, Op, OpKind, OpValue
from engine.model.packed_linear import Packed


@dataclass(slots=True)
class Buffers:
    """All values have the same rows; a word of the graph gives their number."""

    dtype: torch.dtype
    rows: object = None
    places: dict[Node, BufferPlace] = field(default_factory=dict)
    inputs: list[Node] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def new(self, width: int) -> BufferPlace:
        self.widths.append(width)
        return BufferPlace(buffer=len(self.widths) - 1, stride=width, width=width)

    def like(self, place: BufferPlace) -> BufferPlace:
        """Dense, with the same heads."""
        new = self.new(place.heads * place.width)
        return replace(
            new, width=place.width, heads=place.heads, head_stride=place.width, form=place.form
        )

    def read(self, **operands: object) -> dict[str, BufferPlace] | None:
        """Operands from outside become inputs, all or none of them.

        `x` must then be `[1, rows, width]`; others may be angles, `[1, 1, rows, width]`.
        """
        found: dict[str, BufferPlace] = {}
        inputs, rows = list(self.inputs), self.rows
        for name, node in operands.items():
            if not isinstance(node, Node):
                return None
            place = self.places.get(node)
            if place is None:
                word = _rows_of(node, self.dtype, may_be_angles=name != "x")
                if word is None or rows not in (None, word):
                    return None
                rows, place = word, _input(node, inputs)
            found[name] = place
        self.inputs, self.rows = inputs, rows
        return found

    def value(self, place: BufferPlace) -> OpValue:
        own = place.buffer >= 0
        buffer = len(self.inputs) + place.buffer if own else -1 - place.buffer
        return OpValue(buffer, place.offset, place.stride)


def _rows_of(node: Node, dtype: torch.dtype, *, may_be_angles: bool) -> object:
    """The graph's word for the number of rows; None if it is no input."""
    kind = node.meta.get("kind")
    if not isinstance(kind, TensorKind) or kind.dtype != dtype or len(kind.shape) < 3:
        return None
    *ones, rows, width = kind.shape
    fits = ones == [1] or (may_be_angles and ones == [1, 1])
    return rows if fits and isinstance(width, int) else None


def _input(node: Node, inputs: list[Node]) -> BufferPlace:
    if node not in inputs:
        inputs.append(node)
    width = node.meta["kind"].shape[-1]
    return BufferPlace(buffer=-1 - inputs.index(node), stride=width, width=width)


aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    kind: OpKind
    values: dict[str, BufferPlace]
    """# x, y, z, out, more |-> its place"""
    width: int
    heads: int = 1
    head_stride: int = 0
    depth: int = 0
    eps: float = 0.0
    rounds: bool = False
    weight: int | None = None
    bias: int | None = None


class Gathered:
    def __init__(self, made: Captured, fused: Fused) -> None:
        self._made, self._fused = made, fused
        self._buffers = Buffers(fused.dtype)
        self._steps: list[_Step] = []
        self._pairs: dict[Node, tuple[BufferPlace, BufferPlace]] = {}
        self._held: list[object] = []
        self.members: list[Node] = []
        self._makers: dict[object, Callable[[Node], BufferPlace | None]] = {
            operator.call: self._product,
            aten.add.Tensor: self._add,
            fused.rms_norm: self._norm,
            fused.add_rms_norm: self._add_norm,
            fused.rotate: self._rotate,
            fused.silu_mul: self._gate,
            fused.gelu_tanh_mul: self._gate,
        }

    def __contains__(self, node: Node) -> bool:
        return node in self._buffers.places or node in self._pairs

    @property
    def inputs(self) -> list[Node]:
        return self._buffers.inputs

    @property
    def products(self) -> int:
        return sum(step.kind == OpKind.PRODUCT for step in self._steps)

    def is_used_by(self, node: Node) -> bool:
        return any(one in self for one in node.all_input_nodes)

    def would_take(self, node: Node) -> bool:
        """True if an empty chain would take it."""
        return Gathered(self._made, self._fused).take(node)

    def take(self, node: Node) -> bool:
        """Takes a view of a value here, or an operation that can follow."""
        place = self._view(node)
        if place is None and node.op == "call_function" and len(self._steps) < MOST_OPS:
            make = self._makers.get(node.target)
            place = make(node) if make is not None else None
            if place is not None:
                self.members.append(node)
        if place is not None and node not in self._pairs:
            self._buffers.places[node] = place
        return place is not None

    def outputs(self) -> list[tuple[Node, BufferPlace]]:
        """Values that other operations use."""
        return [
            (node, place)
            for node, place in self._buffers.places.items()
            if any(user not in self for user in node.users)
        ]

    def plan(self, outputs: list[BufferPlace]) -> Plan:
        return Plan(
            ops=[self._op(step) for step in self._steps],
            inputs=len(self._buffers.inputs),
            widths=self._buffers.widths,
            outputs=outputs,
            held=self._held,
        )

    def _view(self, node: Node) -> BufferPlace | None:
        source = node.args[0] if node.args else None
        if not isinstance(source, Node):
            return None
        if source in self._pairs and node.target is operator.getitem:
            return self._pairs[source][int(str(node.args[1]))]
        return (
            viewed(self._buffers.places[source], node) if source in self._buffers.places else None
        )

    def _product(self, node: Node) -> BufferPlace | None:
        called, *rest = node.args
        packed = self._constant(called)
        if not isinstance(packed, Packed) or packed.depth is None or len(rest) != 1:
            return None
        inputs = packed.weight.shape[1]
        values = self._buffers.read(x=rest[0])
        if values is None or not values["x"].is_rows or values["x"].width != inputs:
            return None
        self._held.append(packed)
        return self._put(
            _Step(
                kind=OpKind.PRODUCT,
                values=values,
                width=packed.width,
                heads=inputs,
                depth=packed.depth,
                weight=torch.ops.mkldnn.data_ptr(packed.weight),
                bias=None if packed.bias is None else packed.bias.data_ptr(),
            ),
            self._buffers.new(packed.width),
        )

    def _add(self, node: Node) -> BufferPlace | None:
        x, y = node.args[:2]
        values = self._buffers.read(x=x, y=y) if _is_plain_sum(node) else None
        if values is None or not _are_rows(values):
            return None
        width = values["x"].width
        return self._put(
            _Step(kind=OpKind.ADD, values=values, width=width), self._buffers.new(width)
        )

    def _norm(self, node: Node) -> BufferPlace | None:
        x, weight, eps, rounds = node.args
        values = self._buffers.read(x=x)
        if values is None:
            return None
        return self._put(
            replace(
                self._heads_of(OpKind.NORM, values),
                eps=_number(eps),
                rounds=bool(rounds),
                weight=self._hold(weight),
            ),
            self._buffers.like(values["x"]),
        )

    def _add_norm(self, node: Node) -> BufferPlace | None:
        x, y, weight, eps, rounds = node.args
        values = self._buffers.read(x=x, y=y)
        if values is None or not _are_rows(values):
            return None
        width = values["x"].width
        total, normed = self._buffers.new(width), self._buffers.new(width)
        step = _Step(
            kind=OpKind.ADD_NORM,
            values=values | {"more": total},
            width=width,
            eps=_number(eps),
            rounds=bool(rounds),
            weight=self._hold(weight),
        )
        self._pairs[node] = (total, self._put(step, normed))
        return normed

    def _rotate(self, node: Node) -> BufferPlace | None:
        x, cos, sin = node.args
        values = self._buffers.read(x=x, y=cos, z=sin)
        if values is None or not all(values[name].is_rows for name in "yz"):
            return None
        return self._put(self._heads_of(OpKind.ROTATE, values), self._buffers.like(values["x"]))

    def _gate(self, node: Node) -> BufferPlace | None:
        gate, up = node.args
        values = self._buffers.read(x=gate, y=up)
        if values is None or not _are_rows(values):
            return None
        kind = OpKind.SILU if node.target == self._fused.silu_mul else OpKind.GELU
        width = values["x"].width
        return self._put(_Step(kind=kind, values=values, width=width), self._buffers.new(width))

    def _heads_of(self, kind: OpKind, values: dict[str, BufferPlace]) -> _Step:
        x = values["x"]
        return _Step(
            kind=kind, values=values, width=x.width, heads=x.heads, head_stride=x.head_stride
        )

    def _put(self, step: _Step, out: BufferPlace) -> BufferPlace:
        self._steps.append(replace(step, values=step.values | {"out": out}))
        return out

    def _constant(self, node: object) -> object:
        if not (isinstance(node, Node) and node.op == "get_attr"):
            return None
        return self._made.constants[str(node.target)]

    def _hold(self, node: object) -> int:
        tensor = self._constant(node)
        assert isinstance(tensor, torch.Tensor) and tensor.is_contiguous(), node
        self._held.append(tensor)
        return tensor.data_ptr()

    def _op(self, step: _Step) -> Op:
        values = {name: self._buffers.value(place) for name, place in step.values.items()}
        return Op(
            kind=step.kind,
            heads=step.heads,
            width=step.width,
            depth=step.depth,
            head_stride=step.head_stride,
            eps=step.eps,
            rounds=step.rounds,
            weight=step.weight,
            bias=step.bias,
            **values,
        )


def _is_plain_sum(node: Node) -> bool:
    """The sum of two tensors of one shape, `[1, rows, width]`."""
    kinds = [one.meta.get("kind") for one in (node, *node.all_input_nodes)]
    shapes = {one.shape for one in kinds if isinstance(one, TensorKind)}
    is_one = len(shapes) == 1 and all(isinstance(one, TensorKind) for one in kinds)
    return is_one and len(shapes.pop()) == 3 and not node.kwargs and len(node.args) == 2


def _are_rows(values: dict[str, BufferPlace]) -> bool:
    return all(one.is_rows and one.width == values["x"].width for one in values.values())


def _number(value: object) -> float:
    assert isinstance(value, float), value
    return value
