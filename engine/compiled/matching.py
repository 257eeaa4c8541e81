"""Small questions about nodes of a captured graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node


def value(node: Node) -> torch.Tensor:
    """A fake tensor: what the node's dtype and shape are."""
    found: torch.Tensor = node.meta["val"]
    return found


def is_call(node: object, target: object, uses: int | None = None) -> bool:
    """`node` calls `target`, and `uses` others take its result."""
    return (
        isinstance(node, Node)
        and node.op == "call_function"
        and node.target is target
        and (uses is None or len(node.users) == uses)
    )


def only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def constant(made: GraphModule, node: object) -> torch.Tensor | None:
    """The tensor that a node stands for, where it is always the same one."""
    if not (isinstance(node, Node) and node.op == "get_attr"):
        return None
    found: Any = getattr(made, str(node.target))
    return found if isinstance(found, torch.Tensor) else None


def other_operand(node: Node, one: Node) -> object:
    """Of a call with two operands."""
    first, second = node.args[:2]
    return second if first is one else first


def add_constant(made: GraphModule, name: str, content: object, at: Node) -> Node:
    """A node for `content`, before `at`."""
    free = f"_kvrelay_{name}_{len(made.graph.nodes)}"
    while hasattr(made, free):
        free += "_"
    setattr(made, free, content)
    with made.graph.inserting_before(at):
        return made.graph.create_node("get_attr", free)
