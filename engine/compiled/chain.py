"""A chain of operations over few rows, run in one call by torch's own threads. In the worker."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.compiled.chain_call import ChainCall, ChainOps, Op
from engine.compiled.library import Fused
from engine.compiled.places import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`widths` are those of buffers; `outputs` lie in them. `held` is what `ops` point at."""

    ops: Sequence[Op]
    inputs: int
    widths: Sequence[int]
    outputs: Sequence[Place]
    held: Sequence[object]


class Chain:
    """Called with its inputs, of which the first has the rows: `[1, rows, width]`."""

    def __init__(self, plan: Plan, fused: Fused) -> None:
        starts = [0] * plan.inputs
        end = 0
        for width in plan.widths:
            starts.append(end)
            end += width
        self._width = end
        self._ops = (Op * len(plan.ops))(*plan.ops)
        self._starts = (ctypes.c_int64 * len(starts))(*starts)
        self._chain = ChainOps(
            ctypes.addressof(self._ops), ctypes.addressof(self._starts), len(plan.ops), plan.inputs
        )
        self._address = ctypes.addressof(self._chain)
        self._pointers = ctypes.c_void_p * plan.inputs
        self._outputs = [
            (one, one.strides(), starts[plan.inputs + one.buffer]) for one in plan.outputs
        ]
        self._fused, self._held = fused, plan.held

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        dense = [one.contiguous() for one in inputs]
        rows = dense[0].shape[1]
        block = dense[0].new_empty(rows * self._width)
        pointers = self._pointers(*[one.data_ptr() for one in dense])
        call = ChainCall(
            self._address,
            ctypes.addressof(pointers),
            block.data_ptr(),
            self._fused.fork,
            rows,
            torch.get_num_threads(),
        )
        self._fused.run_chain(ctypes.addressof(call))
        return [
            block.as_strided(place.shape(rows), strides, rows * start + place.offset)
            for place, strides, start in self._outputs
        ]
