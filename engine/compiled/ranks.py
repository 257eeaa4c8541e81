"""Lets a captured graph call the ranks of its own worker where their parts come together."""

from __future__ import annotations

import operator

from torch.fx import Node

from engine.compiled.graph import Captured, is_call, kind
from engine.parallel.group import Group
from engine.parallel.layers import JOIN, SUM


def call_group(made: Captured, group: Group) -> None:
    for node in list(made.graph.nodes):
        if is_call(node, SUM):
            _replace(made, node, group.sum, node.args)
        elif is_call(node, JOIN):
            part, _, outputs = node.args
            _replace(made, node, group.join, (part, outputs))


def _replace(made: Captured, node: Node, function: object, args: tuple[object, ...]) -> None:
    called = made.add_constant(function, node)
    with made.graph.inserting_before(node):
        new = made.graph.call_function(operator.call, (called, *args))  # type: ignore[arg-type]
    new.meta["kind"] = kind(node)
    node.replace_all_uses_with(new)
    made.graph.erase_node(node)
