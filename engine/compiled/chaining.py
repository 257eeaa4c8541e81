"""Finds consecutive operations in a graph and makes one call of them, for steps of few rows.

With few rows a product is limited by reading its weights, and the operations between two products
cost more to start than to run. Attention, or an unknown operation, ends a chain.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from engine.compiled.chain import Chain
from engine.compiled.gathering import Gathered
from engine.compiled.graph import Captured
from engine.compiled.library import Fused
from engine.model.capture import Forward
from engine.model.packed_linear import Packed

FEW_TOKENS = 16
"""Up to this many tokens, a step's products are limited by memory."""


def by_tokens(few: Forward, many: Forward) -> Forward:
    """Chooses one of two models by a step's number of tokens."""

    def run(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (few if ids.shape[1] <= FEW_TOKENS else many)(ids, positions, rows)

    return run


def chained(made: Captured, fused: Fused) -> Captured | None:
    """A copy of the graph with chains; None where there is none."""
    copy = _copied(made)
    count = 0
    gathered = Gathered(copy, fused)
    for node in list(copy.graph.nodes):
        if gathered.take(node):
            continue
        if gathered.is_used_by(node) or gathered.would_take(node):
            count += _close(copy, gathered, fused)
            gathered = Gathered(copy, fused)
            gathered.take(node)
    copy.graph.eliminate_dead_code()
    return copy if count else None


def products_left(made: Captured) -> int:
    """Products that oneDNN still computes."""
    calls = made.graph.find_nodes(op="call_function", target=operator.call)
    return sum(isinstance(_called(made, node), Packed) for node in calls)


def _called(made: Captured, node: Node) -> object:
    first: Any = node.args[0]
    return made.constants.get(str(first.target)) if first.op == "get_attr" else None


def _copied(made: Captured) -> Captured:
    graph = Graph()
    nodes: dict[Node, Node] = {}
    graph.output(graph.graph_copy(made.graph, nodes))
    return Captured(graph, dict(made.constants))


def _close(made: Captured, gathered: Gathered, fused: Fused) -> bool:
    """Replaces the gathered operations by one call, if that pays."""
    if not gathered.products:
        return False
    outputs = gathered.outputs()
    chain = Chain(gathered.plan([place for _, place in outputs]), fused)
    last = gathered.members[-1]
    called = made.add_constant(chain, last)
    with made.graph.inserting_after(last):
        new = made.graph.call_function(operator.call, (called, *gathered.inputs))
    for index, (node, _) in reversed(list(enumerate(outputs))):
        with made.graph.inserting_after(new):
            got = made.graph.call_function(operator.getitem, (new, index))
        got.meta["kind"] = node.meta["kind"]
        node.replace_all_uses_with(got, lambda user: user not in gathered)
    return True
