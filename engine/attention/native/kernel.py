"""The built kernel in this process, and the OpenMP team that it runs on.

Its calls mirror engine/device/source/call.h. The calls for the layers of one group in a step share
their common arguments.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray

from engine.attention.inputs import GroupArrays, StepArrays
from engine.device.native_build import SOURCES, BuildError, Source, built, torch_fork
from engine.model.interface import Scores
from kvpool.core.layout.layout import KvLayout

log = logging.getLogger(__name__)


_POINTERS = ("keys", "values", "out", "query", "fresh_keys", "fresh_values")
_STRIDES = ("query_row", "query_head", "key_row", "key_head", "value_row", "value_head")
_TABLES = ("sinks", "slots", "first_rows", "counts", "positions", "block_starts", "blocks", "fork")
_COUNTS = ("threads", "rows", "slices", "heads", "kv_heads", "key_dim", "value_dim")


class LayerCall(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, c_void_p) for name in _POINTERS),
        *((name, c_int64) for name in _STRIDES),
        *((name, c_void_p) for name in _TABLES),
        *((name, c_int32) for name in (*_COUNTS, "block_size", "window", "dtype")),
        ("scaling", c_float),
        ("softcap", c_float),
    ]


SOURCE = Source(
    name="attention",
    main=SOURCES / "attention.cpp",
    parts=tuple(sorted(SOURCES.glob("*.h"))),
    compilers=("g++", "clang++", "c++"),
    flags=(
        *("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast"),
        *("-fPIC", "-shared", "-w"),
    ),
)
DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}


@dataclass(frozen=True, slots=True)
class Kernel:
    attend: Callable[[object], None]  # of a reference to a Call
    dtypes: int  # bit |-> DTYPES' number is served
    fork: int  # of `torch_fork`

    def serves(self, layout: KvLayout) -> bool:
        if not self.dtypes >> DTYPES[layout.dtype] & 1:
            return False
        planes = [group.planes for group in layout.groups]
        return all(
            len(both) == 2 and both[0].heads == both[1].heads and both[0].dim % 2 == 0
            for both in planes
        )


def open_kernel(path: Path) -> Kernel:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} can't be loaded ({error}): remove it") from error
    assert library.kvrelay_call_bytes() == ctypes.sizeof(LayerCall)
    library.kvrelay_attend.argtypes = [ctypes.POINTER(LayerCall)]
    library.kvrelay_attend.restype = None
    return Kernel(library.kvrelay_attend, library.kvrelay_dtypes(), torch_fork())


@cache
def host_kernel() -> Kernel | None:
    """None, and one line in the log, if it can't be built."""
    try:
        return open_kernel(built(SOURCE))
    except BuildError as error:
        log.warning("attention runs in torch's operations, slower than our kernel: %s", error)
        return None


def kernel_for(layout: KvLayout, device: torch.device) -> Kernel | None:
    """None: torch computes attention."""
    if device.type != "cpu":
        return None
    kernel = host_kernel()
    return kernel if kernel is not None and kernel.serves(layout) else None


class Layers:
    """Each call writes a layer's new KV into its slots, then attends."""

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


def _shared(step: StepArrays, group: GroupArrays) -> LayerCall:
    return LayerCall(
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
