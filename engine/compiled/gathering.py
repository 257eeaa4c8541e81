"""The operations of one chain, gathered in the order of their graph, and where their values lie."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from engine.compiled.chain import Plan
from engine.compiled.chain_call import MOST_OPS, Op, OpKind, Value
from engine.compiled.graph import Captured, Kind
from engine.compiled.library import Fused
from engine.compiled.linear import Packed
from engine.compiled.places import Place, viewed

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    kind: OpKind
    values: dict[str, Place]
    """# x, y, z, out, more |-> where it lies"""
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
        self._rows: object = None
        self._steps: list[_Step] = []
        self._places: dict[Node, Place] = {}
        self._pairs: dict[Node, tuple[Place, Place]] = {}
        self._widths: list[int] = []
        self._held: list[object] = []
        self.inputs: list[Node] = []
        self.members: list[Node] = []
        self._makers: dict[object, Callable[[Node], Place | None]] = {
            operator.call: self._product,
            aten.add.Tensor: self._add,
            fused.rms_norm: self._norm,
            fused.add_rms_norm: self._add_norm,
            fused.rotate: self._rotate,
            fused.silu_mul: self._gate,
            fused.gelu_tanh_mul: self._gate,
        }

    def __contains__(self, node: Node) -> bool:
        return node in self._places or node in self._pairs

    @property
    def products(self) -> int:
        return sum(step.kind == OpKind.PRODUCT for step in self._steps)

    def is_used_by(self, node: Node) -> bool:
        return any(one in self for one in node.all_input_nodes)

    def would_take(self, node: Node) -> bool:
        """If it were empty."""
        return Gathered(self._made, self._fused).take(node)

    def take(self, node: Node) -> bool:
        """A view of what is here, or an operation that can follow."""
        place = self._view(node)
        if place is None and node.op == "call_function" and len(self._steps) < MOST_OPS:
            make = self._makers.get(node.target)
            place = make(node) if make is not None else None
            if place is not None:
                self.members.append(node)
        if place is not None and node not in self._pairs:
            self._places[node] = place
        return place is not None

    def outputs(self) -> list[tuple[Node, Place]]:
        """What others use."""
        return [
            (node, place)
            for node, place in self._places.items()
            if any(user not in self for user in node.users)
        ]

    def plan(self, outputs: list[Place]) -> Plan:
        return Plan(
            ops=[self._op(step) for step in self._steps],
            inputs=len(self.inputs),
            widths=self._widths,
            outputs=outputs,
            held=self._held,
        )

    def _view(self, node: Node) -> Place | None:
        source = node.args[0] if node.args else None
        if not isinstance(source, Node):
            return None
        if source in self._pairs and node.target is operator.getitem:
            return self._pairs[source][int(str(node.args[1]))]
        return viewed(self._places[source], node) if source in self._places else None

    def _product(self, node: Node) -> Place | None:
        called, *rest = node.args
        packed = self._constant(called)
        if not isinstance(packed, Packed) or packed.depth is None or len(rest) != 1:
            return None
        inputs = packed.weight.shape[1]
        values = self._read({"x": rest[0]})
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
            self._new(packed.width),
        )

    def _add(self, node: Node) -> Place | None:
        x, y = node.args[:2]
        values = None if node.kwargs else self._read({"x": x, "y": y})
        if values is None or not _are_rows(values):
            return None
        width = values["x"].width
        return self._put(_Step(kind=OpKind.ADD, values=values, width=width), self._new(width))

    def _norm(self, node: Node) -> Place | None:
        x, weight, eps, rounds = node.args
        values = self._read({"x": x})
        if values is None:
            return None
        return self._put(
            replace(
                self._heads_of(OpKind.NORM, values),
                eps=_number(eps),
                rounds=bool(rounds),
                weight=self._hold(weight),
            ),
            self._like(values["x"]),
        )

    def _add_norm(self, node: Node) -> Place | None:
        x, y, weight, eps, rounds = node.args
        values = self._read({"x": x, "y": y})
        if values is None or not _are_rows(values):
            return None
        width = values["x"].width
        total, normed = self._new(width), self._new(width)
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

    def _rotate(self, node: Node) -> Place | None:
        x, cos, sin = node.args
        values = self._read({"x": x, "y": cos, "z": sin})
        if values is None or not all(values[name].is_rows for name in "yz"):
            return None
        return self._put(self._heads_of(OpKind.ROTATE, values), self._like(values["x"]))

    def _gate(self, node: Node) -> Place | None:
        gate, up = node.args
        values = self._read({"x": gate, "y": up})
        if values is None or not _are_rows(values):
            return None
        kind = OpKind.SILU if node.target == self._fused.silu_mul else OpKind.GELU
        width = values["x"].width
        return self._put(_Step(kind=kind, values=values, width=width), self._new(width))

    def _heads_of(self, kind: OpKind, values: dict[str, Place]) -> _Step:
        x = values["x"]
        return _Step(
            kind=kind, values=values, width=x.width, heads=x.heads, head_stride=x.head_stride
        )

    def _put(self, step: _Step, out: Place) -> Place:
        self._steps.append(replace(step, values=step.values | {"out": out}))
        return out

    def _new(self, width: int) -> Place:
        self._widths.append(width)
        return Place(buffer=len(self._widths) - 1, stride=width, width=width)

    def _like(self, place: Place) -> Place:
        """Dense, with the same heads."""
        new = self._new(place.heads * place.width)
        return replace(
            place, buffer=new.buffer, stride=new.stride, offset=0, head_stride=place.width
        )

    def _read(self, operands: dict[str, Any]) -> dict[str, Place] | None:
        """Operands that aren't here become inputs, all or none of them."""
        found: dict[str, Place] = {}
        inputs, rows = list(self.inputs), self._rows
        for name, node in operands.items():
            place = self._places.get(node) if isinstance(node, Node) else None
            if place is None:
                place, word = self._input(node, inputs)
                if place is None or rows not in (None, word):
                    return None
                rows = word
            found[name] = place
        self.inputs, self._rows = inputs, rows
        return found

    def _input(self, node: Any, inputs: list[Node]) -> tuple[Place | None, object]:
        kind = node.meta.get("kind") if isinstance(node, Node) else None
        if not isinstance(kind, Kind) or kind.dtype != self._fused.dtype or node in self:
            return None, None
        is_angles = len(kind.shape) == 4 and kind.shape[:2] == (1, 1)
        width = kind.shape[-1]
        if not (len(kind.shape) == 3 or is_angles) or kind.shape[0] != 1:
            return None, None
        if not isinstance(width, int) or (is_angles and not inputs and not self._places):
            return None, None
        if node not in inputs:
            inputs.append(node)
        return Place(buffer=-1 - inputs.index(node), stride=width, width=width), kind.shape[-2]

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
        values = {name: self._value(place) for name, place in step.values.items()}
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

    def _value(self, place: Place) -> Value:
        own = place.buffer >= 0
        buffer = len(self.inputs) + place.buffer if own else -1 - place.buffer
        return Value(buffer, place.offset, place.stride)


def _are_rows(values: dict[str, Place]) -> bool:
    return all(one.is_rows and one.width == values["x"].width for one in values.values())


def _number(value: object) -> float:
    assert isinstance(value, float), value
    return value
