"""Rotary embeddings that choose their factors while they run (LongRoPE) stay whole in a capture."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.compiled.graph import Captured

_LIBRARY = torch.library.Library("kvrelay", "FRAGMENT")
_LIBRARY.define("angles(Tensor x, Tensor positions, str name, int width) -> (Tensor, Tensor)")
_ANGLES = torch.ops.kvrelay.angles.default


@torch.library.register_fake("kvrelay::angles", lib=_LIBRARY)
def _shapes(
    x: torch.Tensor, positions: torch.Tensor, _: str, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*positions.shape, width)
    return x.new_empty(shape), x.new_empty(shape)


@contextmanager
def whole_rotaries(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """A graph captured inside names these modules instead of what they compute."""
    found = {name: part for name, part in model.named_modules() if _is_rotary(part)}
    try:
        for name, part in found.items():
            part.forward = _Named(name, _width(part, dtype))
        yield
    finally:
        for part in found.values():
            del part.forward


def call_rotaries(made: Captured, model: torch.nn.Module) -> None:
    """The modules that a captured graph names."""
    for node in made.graph.find_nodes(op="call_function", target=_ANGLES):
        x, positions, name, _ = node.args
        module = made.add_constant(model.get_submodule(str(name)), node)
        with made.graph.inserting_before(node):
            angles = made.graph.call_function(operator.call, (module, x, positions))
        node.replace_all_uses_with(angles)
        made.graph.erase_node(node)


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    width: int

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor) -> object:
        return _ANGLES(x, position_ids, self.name, self.width)


def _is_rotary(part: torch.nn.Module) -> bool:
    return type(part).__name__.endswith("RotaryEmbedding")


def _width(part: torch.nn.Module, dtype: torch.dtype) -> int:
    cos, _ = part(torch.zeros(1, 1, 1, dtype=dtype), torch.zeros(1, 1, dtype=torch.long))
    return cos.shape[-1]
