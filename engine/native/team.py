"""The OpenMP threads that torch has, for code of ours: a second team would take their cores."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)


@cache
def torch_fork() -> int:
    """The address of GOMP_parallel in the library that torch is linked with; 0: one thread."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        if (folder / name).exists():
            library = ctypes.CDLL(str(folder / name))
            if hasattr(library, "GOMP_parallel"):
                return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    log.warning("torch uses no OpenMP here: our CPU kernels run on one thread")
    return 0
