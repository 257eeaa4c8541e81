"""The operations of `source/fused.cpp` on torch tensors. Runs in the worker.

The structures of a chain mirror engine/compiled/source/chain.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int32, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import get_num_threads

from engine.attention.native.kernel import SOURCE as NATIVE
from engine.device.native_build import BuildError, Source, built, torch_fork

MOST_OPS = 64


class OpKind(IntEnum):
    PRODUCT = 0
    NORM = 1
    ADD = 2
    ADD_NORM = 3
    ROTATE = 4
    SILU = 5
    GELU = 6


class OpValue(ctypes.Structure):
    _fields_: ClassVar = [(name, c_int32) for name in ("buffer", "offset", "stride", "spare")]


class Op(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, c_int32) for name in ("kind", "heads", "width", "depth", "head_stride", "rounds")),
        ("eps", c_float),
        *((name, OpValue) for name in ("x", "y", "z", "out", "more")),
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


_FOLDER = Path(__file__).parent / "source"
SOURCE = Source(
    name="fused",
    main=_FOLDER / "fused.cpp",
    parts=(*sorted(_FOLDER.glob("*.h")), *NATIVE.parts),
    compilers=NATIVE.compilers,
    flags=(
        *("-std=c++17", "-O3", "-fPIC", "-shared", "-w", "-ffp-contract=fast"),
        *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math"),
        *("-fno-signed-zeros", "-freciprocal-math"),
    ),
)
_POINTER, _COUNT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_TEAM = [_POINTER, _COUNT]
_SIGNATURES: dict[str, list[Any]] = {
    "rms_norm": _TEAM + [_POINTER] * 3 + [_COUNT] * 5 + [_FLOAT, _COUNT],
    "add_rms_norm": _TEAM + [_POINTER] * 5 + [_COUNT] * 2 + [_FLOAT, _COUNT],
    "rotate": _TEAM + [_POINTER] * 4 + [_COUNT] * 6,
    "silu_mul": _TEAM + [_POINTER] * 3 + [_COUNT] * 4,
    "gelu_tanh_mul": _TEAM + [_POINTER] * 3 + [_COUNT] * 4,
    "chain": [_POINTER],
}
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "b16"}
DTYPES = frozenset(_SUFFIX)


class Fused:
    """Implements Operations of one dtype on a CPU, and runs chains of them."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype, self.fork = dtype, torch_fork()
        self.run_chain = _function(library, "chain", dtype)
        self._rms_norm = _function(library, "rms_norm", dtype)
        self._add_rms_norm = _function(library, "add_rms_norm", dtype)
        self._rotate = _function(library, "rotate", dtype)
        self._silu_mul = _function(library, "silu_mul", dtype)
        self._gelu_tanh_mul = _function(library, "gelu_tanh_mul", dtype)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, rounds: bool
    ) -> torch.Tensor:
        shape, strides = x.shape, x.stride()
        heads, head_stride = (shape[2], strides[2]) if len(shape) == 4 else (1, 0)
        out = x.new_empty(shape)
        self._rms_norm(
            self.fork, get_num_threads(), x.data_ptr(), weight.data_ptr(), out.data_ptr(),
            shape[1], heads, shape[-1], strides[1], head_stride, eps, rounds,
        )  # fmt: skip
        return out

    def add_rms_norm(
        self,
        x: torch.Tensor,
        other: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        rounds: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = x.shape
        total, out = x.new_empty(shape), x.new_empty(shape)
        self._add_rms_norm(
            self.fork, get_num_threads(), x.data_ptr(), other.data_ptr(), weight.data_ptr(),
            total.data_ptr(), out.data_ptr(), shape[1], shape[2], eps, rounds,
        )  # fmt: skip
        return total, out

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        _, heads, tokens, dim = x.shape
        strides = x.stride()
        out = x.new_empty((1, tokens, heads, dim))
        self._rotate(
            self.fork, get_num_threads(), x.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            out.data_ptr(), tokens, heads, dim, strides[2], strides[1], cos.stride(2),
        )  # fmt: skip
        return out.transpose(1, 2)

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self._gated(self._silu_mul, gate, up)

    def gelu_tanh_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self._gated(self._gelu_tanh_mul, gate, up)

    def _gated(
        self, function: Callable[..., None], gate: torch.Tensor, up: torch.Tensor
    ) -> torch.Tensor:
        """Activation of `gate` times `up`, both `[1, tokens, width]`."""
        shape = gate.shape
        out = gate.new_empty(shape)
        function(
            self.fork, get_num_threads(), gate.data_ptr(), up.data_ptr(), out.data_ptr(),
            shape[1], shape[2], gate.stride(1), up.stride(1),
        )  # fmt: skip
        return out


def _function(library: ctypes.CDLL, name: str, dtype: torch.dtype) -> Callable[..., None]:
    function = library[f"{name}_{_SUFFIX[dtype]}"]
    function.argtypes, function.restype = _SIGNATURES[name], None
    return function


def load_library() -> ctypes.CDLL:
    """Builds it if it isn't cached. Raises BuildError."""
    return open_library(built(SOURCE))


def open_library(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} can't be loaded ({error}): remove it") from error
    assert library.kvrelay_op_bytes() == ctypes.sizeof(Op)
    return library


@cache
def _library() -> ctypes.CDLL:
    return load_library()


def open_fused(dtype: torch.dtype) -> Fused:
    """`dtype` is one of DTYPES. Builds the library if it isn't cached. Raises BuildError."""
    return Fused(_library(), dtype)
