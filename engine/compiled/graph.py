"""A captured forward pass: its operations in order, and its constant tensors.

Values that depend on constants alone are computed once. A captured graph calls the ranks of its own
worker where their parts are combined, and where a stage of a pipeline begins and ends.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from engine.device.group import Group
from engine.device.stage import Stage
from engine.parallel.split import JOIN, SUM
from engine.parallel.stages import RECEIVED, SENT


@dataclass(frozen=True, slots=True)
class TensorKind:
    """The kind of tensor that an operation makes. Sizes and strides that depend on the step are
    words."""

    dtype: torch.dtype
    shape: tuple[int | str, ...]
    strides: tuple[int | str, ...]

    @property
    def is_step(self) -> bool:
        """`[1, ...]`, and values of the last dimension are adjacent."""
        return bool(self.strides) and self.strides[-1] == 1 and self.shape[0] == 1

    def wide(self, width: int) -> TensorKind:
        return replace(self, shape=(*self.shape[:-1], width))


@dataclass(frozen=True, slots=True)
class Captured:
    graph: Graph
    constants: dict[str, Any]
    """# target of a get_attr node |-> its value"""

    def constant(self, node: object) -> torch.Tensor | None:
        """The tensor of a node that is always the same."""
        if not (isinstance(node, Node) and node.op == "get_attr"):
            return None
        found = self.constants[str(node.target)]
        return found if isinstance(found, torch.Tensor) else None

    def add_constant(self, content: object, at: Node) -> Node:
        """A node for `content`, before `at`."""
        name = f"made_{len(self.constants)}"
        while name in self.constants:
            name += "_"
        self.constants[name] = content
        with self.graph.inserting_before(at):
            return self.graph.create_node("get_attr", name)

    def forget(self, node: Node) -> None:
        """Removes a constant's node that nobody uses."""
        self.graph.erase_node(node)
        if all(node.target != other.target for other in self.graph.find_nodes(op="get_attr")):
            del self.constants[str(node.target)]

    @property
    def calls(self) -> int:
        return sum(node.op.startswith("call") for node in self.graph.nodes)


def kind(node: object) -> TensorKind:
    """The kind of a node with one tensor as its result."""
    assert isinstance(node, Node), node
    found = node.meta["kind"]
    assert isinstance(found, TensorKind), node
    return found


def is_call(node: object, target: object, uses: int | None = None) -> bool:
    """`node` calls `target`, and `uses` other nodes take its result."""
    return (
        isinstance(node, Node)
        and node.op == "call_function"
        and node.target is target
        and (uses is None or len(node.users) == uses)
    )


def only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def other_operand(node: Node, one: object) -> Any:
    """The other operand of a call with two."""
    first, second = node.args[:2]
    return second if first is one else first


_MOST_VALUES = 1 << 20
"""Larger values would take memory twice."""


def fold_constants(made: Captured) -> None:
    for node in list(made.graph.nodes):
        found = _computed(made, node)
        if found is not None:
            node.replace_all_uses_with(_constant_node(made, node, found))
    made.graph.eliminate_dead_code()


def _constant_node(made: Captured, node: Node, found: torch.Tensor) -> Node:
    new = made.add_constant(found, node)
    new.meta["kind"] = node.meta["kind"]
    return new


def _computed(made: Captured, node: Node) -> torch.Tensor | None:
    inputs = node.all_input_nodes
    if (
        node.op != "call_function"
        or not inputs
        or not isinstance(node.target, torch._ops.OpOverload)
    ):
        return None
    known = {one: made.constant(one) for one in inputs}
    if any(tensor is None or tensor.numel() > _MOST_VALUES for tensor in known.values()):
        return None
    args = torch.fx.map_arg(node.args, known.__getitem__)
    kwargs = torch.fx.map_arg(node.kwargs, known.__getitem__)
    with torch.no_grad():
        found = node.target(*args, **kwargs)
    return found if isinstance(found, torch.Tensor) else None


def call_group(made: Captured, group: Group) -> None:
    for node in list(made.graph.nodes):
        if is_call(node, SUM):
            _replace(made, node, group.sum, node.args)
        elif is_call(node, JOIN):
            part, _, outputs = node.args
            _replace(made, node, group.join, (part, outputs))


def call_stage(made: Captured, stage: Stage) -> None:
    for node in list(made.graph.nodes):
        if is_call(node, RECEIVED):
            _replace(made, node, stage.receive, node.args)
        elif is_call(node, SENT):
            _replace(made, node, stage.send, node.args)


def _replace(made: Captured, node: Node, function: object, args: tuple[object, ...]) -> None:
    called = made.add_constant(function, node)
    with made.graph.inserting_before(node):
        new = made.graph.call_function(operator.call, (called, *args))  # type: ignore[arg-type]
    new.meta["kind"] = kind(node)
    node.replace_all_uses_with(new)
    made.graph.erase_node(node)
