"""Named int32 arrays in one buffer, so that a step sends the device one copy."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from engine.backends.step_arrays import Ints

_ALIGNED = 4
"""Elements: arrays begin at multiples of 16 bytes, which lets kernels load them in one go."""


class Packing:
    """`shapes` are the most that each array holds; the last may be sent in part."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(shapes)
        self._begins: dict[str, int] = {}
        self.elements = 0
        for name, shape in self._shapes.items():
            self._begins[name] = self.elements
            self.elements += -(-prod(shape) // _ALIGNED) * _ALIGNED

    def pack(self, arrays: Mapping[str, Ints], *, pinned: bool) -> torch.Tensor:
        """What is to be sent; what an array doesn't fill is left as it comes."""
        last = next(reversed(self._shapes))
        used = self._begins[last] + arrays[last].size
        host = torch.empty(used, dtype=torch.int32, pin_memory=pinned)
        flat = host.numpy()
        for name, array in arrays.items():
            begin = self._begins[name]
            assert array.size <= prod(self._shapes[name]), (name, array.shape)
            flat[begin : begin + array.size] = array.ravel()
        return host

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays in a buffer that holds what `pack` made."""
        return {
            name: flat[begin : begin + prod(self._shapes[name])].view(self._shapes[name])
            for name, begin in self._begins.items()
        }
