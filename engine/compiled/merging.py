"""Packs the weights of a captured graph's linear layers, and merges those with one input.

The model's own modules are told to use the same memory, so that no weight is kept twice.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Node

from engine.compiled.capture import LINEAR
from engine.compiled.graph import Captured, kind
from engine.compiled.linear import Packed, PackedLinear, can_pack, pack


@dataclass(frozen=True, slots=True)
class Place:
    """Where a linear layer hangs in its model."""

    parent: torch.nn.Module
    name: str
    module: torch.nn.Linear


def pack_graph(made: Captured, model: torch.nn.Module) -> None:
    """In graph and model alike. What can't be packed, or is used twice, stays as it is."""
    owners = {id(place.module.weight): place for place in _packable(model)}
    for nodes in _by_input(made, owners):
        _merge(made, nodes, [owners.pop(id(made.constant(node.args[1]))) for node in nodes])
        _release(made, nodes)


def _by_input(made: Captured, owners: dict[int, Place]) -> list[list[Node]]:
    uses = Counter(id(made.constant(node.args[1])) for node in _linear_nodes(made))
    groups: dict[Node, list[Node]] = defaultdict(list)
    for node in _linear_nodes(made):
        weight = id(made.constant(node.args[1]))
        if weight in owners and uses[weight] == 1:
            source: Any = node.args[0]
            groups[source].append(node)
    return list(groups.values())


def _linear_nodes(made: Captured) -> list[Node]:
    return made.graph.find_nodes(op="call_function", target=LINEAR)


def pack_modules(model: torch.nn.Module) -> None:
    """Each linear layer for itself, where there is no graph to tell which belong together."""
    for place in _packable(model):
        packed = pack([place.module.weight], [place.module.bias])
        setattr(place.parent, place.name, PackedLinear(packed, 0, packed.width))


def linears(model: torch.nn.Module) -> Iterator[Place]:
    """Those that nothing but themselves is known to look at."""
    for parent in model.modules():
        for name, module in parent.named_children():
            if type(module) is torch.nn.Linear and not _has_hooks(module):
                yield Place(parent, name, module)


def _packable(model: torch.nn.Module) -> list[Place]:
    return [place for place in linears(model) if can_pack(place.module.weight)]


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _merge(made: Captured, nodes: Sequence[Node], places: Sequence[Place]) -> None:
    """The nodes have one input, and become one product."""
    linears = [place.module for place in places]
    packed = pack([one.weight for one in linears], [one.bias for one in linears])
    ends = [0]
    for one in linears:
        ends.append(ends[-1] + one.out_features)
    for place, (start, stop) in zip(places, pairwise(ends), strict=True):
        setattr(place.parent, place.name, PackedLinear(packed, start, stop))
    product = _product(made, nodes[0], packed)
    for index, node in enumerate(nodes):
        part = product if len(nodes) == 1 else _part(made, product, ends[index], ends[index + 1])
        node.replace_all_uses_with(part)


def _product(made: Captured, first: Node, packed: Packed) -> Node:
    weight = made.add_constant(packed, first)
    with made.graph.inserting_before(first):
        product = made.graph.call_function(operator.call, (weight, first.args[0]))
    product.meta["kind"] = kind(first).wide(packed.width)
    return product


def _part(made: Captured, product: Node, start: int, stop: int) -> Node:
    with made.graph.inserting_after(product):
        part = made.graph.call_method("narrow", (product, -1, start, stop - start))
    part.meta["kind"] = kind(product).wide(stop - start)
    return part


def _release(made: Captured, nodes: Sequence[Node]) -> None:
    """The graph's own hold on weights that are packed now."""
    for node in nodes:
        constants = [one for one in node.all_input_nodes if one.op == "get_attr"]
        made.graph.erase_node(node)
        for one in constants:
            if not one.users:
                made.forget(one)
