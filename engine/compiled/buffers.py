"""What one chain reads and writes: its inputs, its own buffers, and where each value lies."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from engine.compiled.chain_call import Value
from engine.compiled.graph import Kind
from engine.compiled.places import Place


@dataclass(slots=True)
class Buffers:
    """All values have the same rows; a graph says by a word how many they are."""

    dtype: torch.dtype
    rows: object = None
    places: dict[Node, Place] = field(default_factory=dict)
    inputs: list[Node] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def new(self, width: int) -> Place:
        self.widths.append(width)
        return Place(buffer=len(self.widths) - 1, stride=width, width=width)

    def like(self, place: Place) -> Place:
        """Dense, with the same heads."""
        new = self.new(place.heads * place.width)
        return replace(
            new, width=place.width, heads=place.heads, head_stride=place.width, form=place.form
        )

    def read(self, **operands: object) -> dict[str, Place] | None:
        """Operands that aren't here become inputs, all or none of them.

        `x` must then be `[1, rows, width]`; others may be angles, `[1, 1, rows, width]`.
        """
        found: dict[str, Place] = {}
        inputs, rows = list(self.inputs), self.rows
        for name, node in operands.items():
            if not isinstance(node, Node):
                return None
            place = self.places.get(node)
            if place is None:
                word = _rows_of(node, self.dtype, may_be_angles=name != "x")
                if word is None or rows not in (None, word):
                    return None
                rows, place = word, _input(node, inputs)
            found[name] = place
        self.inputs, self.rows = inputs, rows
        return found

    def value(self, place: Place) -> Value:
        own = place.buffer >= 0
        buffer = len(self.inputs) + place.buffer if own else -1 - place.buffer
        return Value(buffer, place.offset, place.stride)


def _rows_of(node: Node, dtype: torch.dtype, *, may_be_angles: bool) -> object:
    """The graph's word for them; None where it is no input."""
    kind = node.meta.get("kind")
    if not isinstance(kind, Kind) or kind.dtype != dtype or len(kind.shape) < 3:
        return None
    *ones, rows, width = kind.shape
    fits = ones == [1] or (may_be_angles and ones == [1, 1])
    return rows if fits and isinstance(width, int) else None


def _input(node: Node, inputs: list[Node]) -> Place:
    if node not in inputs:
        inputs.append(node)
    width = node.meta["kind"].shape[-1]
    return Place(buffer=-1 - inputs.index(node), stride=width, width=width)
