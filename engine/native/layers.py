"""The kernel's calls for the layers of one group in one step: what they share is said once."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from numpy.typing import NDArray

from engine.attention import Scores
from engine.backends.step_arrays import GroupArrays, StepArrays
from engine.native.call import Call
from engine.native.kernel import DTYPES, Kernel
from kvpool.layout import KvLayout


class Layers:
    """Each call puts a layer's new KV into its slots, then attends."""

    def __init__(self, kernel: Kernel, layout: KvLayout, group: int, step: StepArrays) -> None:
        mine = step.groups[group]
        self._kernel, self._held = kernel, (step, mine)  # the call holds addresses only
        self._call = _shared(step, mine)
        self._call.fork, self._call.threads = kernel.fork, torch.get_num_threads()
        self._call.block_size = layout.block_size
        self._call.window = layout.groups[group].window or 0
        self._call.dtype = DTYPES[layout.dtype]

    def attend(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        """`keys` and `values` `[slots, kv_heads, dim]`, the others `[1, heads, tokens, dim]`.
        Returns `[1, tokens, heads, value_dim]`."""
        query, key, value = _dense(query), _dense(key), _dense(value)
        sinks = None if scores.sinks is None else scores.sinks.float().contiguous()
        _, heads, tokens, dim = query.shape
        _, kv_heads, _, value_dim = value.shape
        out = query.new_empty(1, tokens, heads, value_dim)
        call = self._call
        call.keys, call.values, call.out = keys.data_ptr(), values.data_ptr(), out.data_ptr()
        call.query, call.fresh_keys = query.data_ptr(), key.data_ptr()
        call.fresh_values = value.data_ptr()
        _, call.query_head, call.query_row, _ = query.stride()
        _, call.key_head, call.key_row, _ = key.stride()
        _, call.value_head, call.value_row, _ = value.stride()
        call.heads, call.kv_heads, call.key_dim, call.value_dim = heads, kv_heads, dim, value_dim
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.scaling, call.softcap = scores.scaling, scores.softcap or 0.0
        self._kernel.attend(ctypes.byref(call))
        return out


def _shared(step: StepArrays, group: GroupArrays) -> Call:
    return Call(
        slots=_address(group.slots),
        blocks=_address(group.tables),
        block_starts=_address(group.table_starts),
        first_rows=_address(step.rows),
        counts=_address(step.counts),
        positions=_address(step.starts),
        rows=len(step.positions),
        slices=len(step.counts),
    )


def _address(array: NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    address: int = array.__array_interface__["data"][0]
    return address


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()
