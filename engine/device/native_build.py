"""Builds our C and C++ with the host's compiler, once for each source, compiler and processor.

Also torch's OpenMP threads for our code: a second team would take their cores.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

import torch

from engine.device.kept_files import NotKept, alone, cache_folder, checked, keep_digest, own_folder

SOURCES = Path(__file__).parent / "source"
"""The C++ sources of kernels. One may include parts of another."""


log = logging.getLogger(__name__)

_TIMEOUT_S = 120


class BuildError(Exception):
    """It can't be built or loaded on this host; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The first installed one of `compilers` compiles `main`, which includes `parts`."""

    name: str
    main: Path
    parts: tuple[Path, ...] = ()
    compilers: tuple[str, ...]
    flags: tuple[str, ...]

    def compiler(self) -> str:
        for name in self.compilers:
            if found := shutil.which(name):
                return found
        names = ", ".join(self.compilers)
        raise BuildError(f"no compiler ({names}) is installed: install {self.compilers[0]}")


def built(source: Source, folder: Path | None = None, processor: str = "native") -> Path:
    """The shared library's file in `folder` (the user's cache); built if it isn't there.

    `processor` is the compiler's -march. Of processes that start together one builds, and the
    others wait, if the file system can lock. The file appears whole. Raises BuildError.
    """
    compiler = source.compiler()
    flags = (*source.flags, f"-march={processor}")
    name = f"{source.name}-{_key(source, compiler, flags)}.so"
    folder = folder or cache_folder() / "native"
    try:
        target = own_folder(own_folder(folder.parent) / folder.name) / name
        if not _is_kept(target):
            with alone(target):
                if not _is_kept(target):
                    _build([compiler, *flags], source, target)
    except OSError as error:
        raise BuildError(f"{name} can't be kept in {folder}: {error}") from error
    return target


def _is_kept(target: Path) -> bool:
    try:
        checked(target)
    except NotKept:
        return False
    return True


def _build(compiler: list[str], source: Source, target: Path) -> None:
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        draft = Path(folder) / target.name
        _compile(compiler, source.main, draft)
        draft.chmod(0o700)
        keep_digest(target, draft.read_bytes())
        os.replace(draft, target)
    log.info(
        "built the CPU's %s in %.1f s with %s, once for this host: %s",
        source.name,
        time.monotonic() - began_s,
        compiler[0],
        target,
    )


def _compile(compiler: list[str], main: Path, target: Path) -> None:
    command = [*compiler, "-o", str(target), str(main), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler[0]} did not end within {_TIMEOUT_S} s") from error
    if done.returncode != 0:
        first = next(iter(done.stderr.strip().splitlines()), f"exit status {done.returncode}")
        raise BuildError(
            f"{compiler[0]} could not build {main.name} ({first}): install gcc 10 or later"
        )


def _key(source: Source, compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    digest = blake2b(digest_size=10)
    for part in (compiler, version, " ".join(flags), _processor()):
        digest.update(part.encode() + b"\0")
    for path in (source.main, *source.parts):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    """The result of `-march=native` depends on this."""
    names = ("model name", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(names)))


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
