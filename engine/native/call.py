"""One layer's call of the kernel. Mirrors engine/native/source/call.h."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import ClassVar

_POINTERS = ("keys", "values", "out", "query", "fresh_keys", "fresh_values")
_STRIDES = ("query_row", "query_head", "key_row", "key_head", "value_row", "value_head")
_TABLES = ("sinks", "slots", "first_rows", "counts", "positions", "block_starts", "blocks", "fork")
_COUNTS = ("threads", "rows", "slices", "heads", "kv_heads", "key_dim", "value_dim")


class Call(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, c_void_p) for name in _POINTERS),
        *((name, c_int64) for name in _STRIDES),
        *((name, c_void_p) for name in _TABLES),
        *((name, c_int32) for name in (*_COUNTS, "block_size", "window", "dtype")),
        ("scaling", c_float),
        ("softcap", c_float),
    ]
