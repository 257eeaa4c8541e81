"""Packs the weights of a captured graph's linear layers, and merges layers with the same input.

The model's own modules then use the same memory, so that no weight is kept twice.

On a GPU weights are not packed, but linear layers with the same input become one product too:
queries, keys and values; gates and their factors. Their weights become one tensor, and the old ones
are freed at the same time. Where the forward pass stays the model's own, a run shows which layers
of one module these are, and the first one called computes for all.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Node

from engine.compiled.graph import Captured, kind
from engine.device.host_memory import return_freed
from engine.model.capture import LINEAR
from engine.model.packed_linear import Packed, PackedLinear, can_pack, join_biases, pack


@dataclass(frozen=True, slots=True)
class LinearPlace:
    """The place of a linear layer in its model."""

    parent: torch.nn.Module
    name: str
    module: torch.nn.Linear


def pack_graph(made: Captured, model: torch.nn.Module) -> None:
    """Packs in graph and model alike. Layers that can't be packed, or are used twice, stay as they
    are."""
    owners = {id(place.module.weight): place for place in _packable(model)}
    for nodes in _by_input(made, owners):
        _merge(made, nodes, [owners.pop(id(made.constant(node.args[1]))) for node in nodes])
        _release(made, nodes)
        return_freed()


def merge_graph(made: Captured, model: torch.nn.Module) -> int:
    """Merges layers with the same input, in graph and model alike. Returns the number of
    products."""
    owners = {id(place.module.weight): place for place in linears(model)}
    groups = [nodes for nodes in _by_input(made, owners) if len(nodes) > 1]
    for nodes in groups:
        product = _merge_places([owners.pop(id(made.constant(node.args[1]))) for node in nodes])
        _call_product(made, nodes, product)
        _release(made, nodes)
        _free_cached()
    for node in _linear_nodes(made):
        node.target = torch.nn.functional.linear
    return len(groups)


def _call_product(made: Captured, nodes: Sequence[Node], product: _Product) -> None:
    first, start = nodes[0], 0
    linear = product.linear
    weights = [made.add_constant(one, first) for one in (linear.weight, linear.bias)]
    with made.graph.inserting_before(first):
        whole = made.graph.call_function(torch.nn.functional.linear, (first.args[0], *weights))
    whole.meta["kind"] = kind(first).wide(product.width)
    for node in nodes:
        width = kind(node).shape[-1]
        assert isinstance(width, int)
        node.replace_all_uses_with(_part(made, whole, start, start + width))
        start += width


def _by_input(made: Captured, owners: dict[int, LinearPlace]) -> list[list[Node]]:
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
    """Packs each linear layer by itself, without a graph that shows which belong together."""
    places = _packable(model)[::-1]
    while places:  # a place that is done holds no weights any more
        place = places.pop()
        packed = pack([place.module.weight], [place.module.bias])
        setattr(place.parent, place.name, PackedLinear(packed, 0, packed.width))
        del place
        return_freed()


def linears(model: torch.nn.Module) -> Iterator[LinearPlace]:
    """Linear layers without hooks, so that they can be replaced."""
    for parent in model.modules():
        for name, module in parent.named_children():
            if type(module) is torch.nn.Linear and not _has_hooks(module):
                yield LinearPlace(parent, name, module)


def _packable(model: torch.nn.Module) -> list[LinearPlace]:
    return [place for place in linears(model) if can_pack(place.module.weight)]


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _merge(made: Captured, nodes: Sequence[Node], places: Sequence[LinearPlace]) -> None:
    """The nodes have the same input, and become one product."""
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
    """The graph's own reference to weights that are packed now."""
    for node in nodes:
        constants = [one for one in node.all_input_nodes if one.op == "get_attr"]
        made.graph.erase_node(node)
        for one in constants:
            if not one.users:
                made.forget(one)


class _Product(torch.nn.Module):
    """The product of all parts' weights. A result is kept until its last part is taken."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.linear, self.width = linear, linear.out_features
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def take(self, x: torch.Tensor, *, is_last: bool) -> torch.Tensor:
        last = self._last
        product = last[1] if last is not None and last[0] is x else self.linear(x)
        self._last = None if is_last else (x, product)
        return product


class MergedLinear(torch.nn.Module):
    """Replaces an `nn.Linear`: the columns `[start, stop)` of a product."""

    def __init__(self, product: _Product, start: int, stop: int) -> None:
        super().__init__()
        self.product, self.start, self.stop = product, start, stop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_last = self.stop == self.product.width
        return self.product.take(x, is_last=is_last)[..., self.start : self.stop]

    def extra_repr(self) -> str:
        return f"{self.start} to {self.stop} of {self.product.width}"


def merge_projections(module: torch.nn.Module, run: Callable[[], object]) -> int:
    """`run` runs the model once. Returns the number of products."""
    found = [places for places in _seen(module, run) if len(places) > 1]
    count = len(found)
    while found:
        _merge_places(found.pop())
        _free_cached()
    return count


def _free_cached() -> None:
    """Else the old weights' memory is kept, in pieces too small."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@dataclass(slots=True)
class _Calls:
    """Inputs are held, so that no two of them have the same address."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    places: dict[tuple[int, int, torch.dtype], list[LinearPlace]] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)
    _names: set[int] = field(default_factory=set)

    def called(self, place: LinearPlace, x: torch.Tensor) -> None:
        one = id(place.module)
        if one in self._names:
            self.again.add(one)
            return
        self._names.add(one)
        self.inputs.append(x)
        kind = (id(place.parent), id(x), place.module.weight.dtype)
        self.places.setdefault(kind, []).append(place)


def _seen(module: torch.nn.Module, run: Callable[[], object]) -> Iterator[list[LinearPlace]]:
    """Layers with the same input, in the order of their calls; none that is called twice."""
    calls, hooks = _Calls(), []
    for place in list(linears(module)):

        def hook(_: torch.nn.Module, args: tuple[torch.Tensor], place: LinearPlace = place) -> None:
            calls.called(place, args[0])

        hooks.append(place.module.register_forward_pre_hook(hook))
    try:
        run()
    finally:
        for one in hooks:
            one.remove()
    for places in calls.places.values():
        yield [place for place in places if id(place.module) not in calls.again]


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Linear:
    outputs, inputs = weight.shape
    made = torch.nn.Linear(inputs, outputs, bias=False, device="meta")
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = torch.nn.Parameter(bias, requires_grad=False)
    return made


def _merge_places(places: Sequence[LinearPlace]) -> _Product:
    layers = [place.module for place in places]
    weights = [layer.weight.detach() for layer in layers]
    ends = [0]
    for layer in layers:
        ends.append(ends[-1] + layer.out_features)
    biases = join_biases(weights, [one.bias for one in layers])
    product = _Product(_linear(torch.cat(weights), biases))
    for place, (start, stop) in zip(places, pairwise(ends), strict=True):
        setattr(place.parent, place.name, MergedLinear(product, start, stop))
    return product
