"""Linear layers of one module that have one input become one product, where the forward pass stays
the model's own: queries, keys and values; gates and what they are multiplied with.

Which they are is seen in a run. The first that is called computes for all; their weights are one
tensor, and the old ones are given back as it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from engine.compiled.linear import join_biases
from engine.compiled.merging import Place, linears


class _Product(torch.nn.Module):
    """Of the weights of all parts. What was computed last is kept until its last part is taken."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def take(self, x: torch.Tensor, *, is_last: bool) -> torch.Tensor:
        last = self._last
        if last is not None and last[0] is x:
            product = last[1]
        else:
            product = torch.nn.functional.linear(x, self.weight, self.bias)
        self._last = None if is_last else (x, product)
        return product


class MergedLinear(torch.nn.Module):
    """In place of an `nn.Linear`: the columns `[start, stop)` of a product."""

    def __init__(self, product: _Product, start: int, stop: int) -> None:
        super().__init__()
        self.product, self.start, self.stop = product, start, stop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_last = self.stop == self.product.weight.shape[0]
        return self.product.take(x, is_last=is_last)[..., self.start : self.stop]

    def extra_repr(self) -> str:
        return f"{self.start} to {self.stop} of {self.product.weight.shape[0]}"


def merge_projections(module: torch.nn.Module, run: Callable[[], object]) -> int:
    """`run` runs the model once. How many products were made."""
    found = [places for places in _seen(module, run) if len(places) > 1]
    count = len(found)
    while found:
        _merge(found.pop())
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # else the old weights' memory is kept, in pieces too small
    return count


@dataclass(slots=True)
class _Calls:
    """Inputs are held so that no two of them are at one address."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    places: dict[tuple[int, int, torch.dtype], list[Place]] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)
    _names: set[int] = field(default_factory=set)

    def called(self, place: Place, x: torch.Tensor) -> None:
        one = id(place.module)
        if one in self._names:
            self.again.add(one)
            return
        self._names.add(one)
        self.inputs.append(x)
        kind = (id(place.parent), id(x), place.module.weight.dtype)
        self.places.setdefault(kind, []).append(place)


def _seen(module: torch.nn.Module, run: Callable[[], object]) -> Iterator[list[Place]]:
    """Those with one input, in the order of their calls; none that is called twice."""
    calls, hooks = _Calls(), []
    for place in list(linears(module)):

        def hook(_: torch.nn.Module, args: tuple[torch.Tensor], place: Place = place) -> None:
            calls.called(place, args[0])

        hooks.append(place.module.register_forward_pre_hook(hook))
    try:
        run()
    finally:
        for one in hooks:
            one.remove()
    for places in calls.places.values():
        yield [place for place in places if id(place.module) not in calls.again]


def _merge(places: Sequence[Place]) -> None:
    layers = [place.module for place in places]
    weights = [layer.weight.detach() for layer in layers]
    ends = [0]
    for layer in layers:
        ends.append(ends[-1] + layer.out_features)
    product = _Product(torch.cat(weights), join_biases(weights, [one.bias for one in layers]))
    for place, (start, stop) in zip(places, pairwise(ends), strict=True):
        setattr(place.parent, place.name, MergedLinear(product, start, stop))
