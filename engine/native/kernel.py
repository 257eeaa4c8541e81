"""The built kernel in this process, and the OpenMP team that it runs on."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from engine.native.build import BuildError, Source, built
from engine.native.call import Call
from engine.native.team import torch_fork
from kvpool.layout import KvLayout

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent / "source"
SOURCE = Source(
    name="attention",
    main=_FOLDER / "attention.cpp",
    parts=tuple(sorted(_FOLDER.glob("*.h"))),
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
    assert library.kvrelay_call_bytes() == ctypes.sizeof(Call)
    library.kvrelay_attend.argtypes = [ctypes.POINTER(Call)]
    library.kvrelay_attend.restype = None
    return Kernel(library.kvrelay_attend, library.kvrelay_dtypes(), torch_fork())


@cache
def host_kernel() -> Kernel | None:
    """None, and one line in the log, where it can't be built."""
    try:
        return open_kernel(built(SOURCE))
    except BuildError as error:
        log.warning("attention runs in torch's operations, slower than our kernel: %s", error)
        return None


def kernel_for(layout: KvLayout, device: torch.device) -> Kernel | None:
    """None: attention is left to torch."""
    if device.type != "cpu":
        return None
    kernel = host_kernel()
    return kernel if kernel is not None and kernel.serves(layout) else None
