"""Computes once what a captured graph would compute from constants alone, each time."""

from __future__ import annotations

import torch
from torch.fx import Node

from engine.compiled.graph import Captured

_MOST_VALUES = 1 << 20
"""Larger ones would take memory twice."""


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
