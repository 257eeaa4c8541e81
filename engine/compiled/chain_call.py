"""What a chain of operations is to C++. Mirrors engine/compiled/source/chain.h."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_void_p
from enum import IntEnum
from typing import ClassVar

MOST_OPS = 64


class OpKind(IntEnum):
    PRODUCT = 0
    NORM = 1
    ADD = 2
    ADD_NORM = 3
    ROTATE = 4
    SILU = 5
    GELU = 6


class Value(ctypes.Structure):
    _fields_: ClassVar = [(name, c_int32) for name in ("buffer", "offset", "stride", "spare")]


class Op(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, c_int32) for name in ("kind", "heads", "width", "depth", "head_stride", "rounds")),
        ("eps", c_float),
        *((name, Value) for name in ("x", "y", "z", "out", "more")),
        *((name, c_void_p) for name in ("weight", "bias")),
    ]


class ChainOps(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("ops", "starts")),
        *((name, c_int32) for name in ("count", "inputs")),
    ]


class ChainCall(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("chain", "inputs", "block", "fork")),
        *((name, c_int32) for name in ("rows", "threads")),
    ]
