"""Builds and loads the library of `fused.c`, for this machine's processor. Runs in the worker.

The library is kept in the user's cache folder. Workers that start at once may each build it; the
file appears whole, so none loads half of another's.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from engine.compiled.folder import cache_folder

_SOURCE = Path(__file__).with_name("fused.c")
_FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-std=c11"),
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math"),
    *("-fno-signed-zeros", "-freciprocal-math"),
)
_BUILD_S = 120


class NoCompiler(Exception):
    """There is none, or it can't build this; the message says which."""


def load_library() -> ctypes.CDLL:
    """Builds it first where it isn't cached. Raises NoCompiler."""
    path = cache_folder() / f"fused-{_key()}.so"
    if not path.exists():
        _build(path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoCompiler(f"{path} can't be loaded: {error}") from error


def _key() -> str:
    """Of all that decides what the compiler makes."""
    cpu = Path("/proc/cpuinfo")
    features = [line for line in cpu.read_text().splitlines() if line.startswith("flags")][:1]
    parts = (_SOURCE.read_text(), *_FLAGS, platform.machine(), *features)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _build(path: Path) -> None:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise NoCompiler("there is no C compiler (cc, gcc or clang) on the path")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(made), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_S)
            made.rename(path)
    except subprocess.CalledProcessError as error:
        reason = " ".join(error.stderr.split())[-300:]
        raise NoCompiler(f"{compiler} can't build {_SOURCE.name}: {reason}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{path} can't be built: {error}") from error
