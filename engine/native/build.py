"""Builds the kernel with the host's compiler, once for each source, compiler and processor."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from hashlib import blake2b
from pathlib import Path

from engine.compiled.folder import cache_folder

log = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "source"
COMPILERS = ("g++", "clang++", "c++")
FLAGS = (
    *("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast"),
    *("-fPIC", "-shared", "-w"),
)
_TIMEOUT_S = 120


class BuildError(Exception):
    """There is no kernel on this host; the message says why and what to do."""


def find_compiler() -> str:
    for name in COMPILERS:
        if found := shutil.which(name):
            return found
    raise BuildError(f"no C++ compiler ({', '.join(COMPILERS)}) is installed: install g++")


def built_kernel(folder: Path | None = None, processor: str = "native") -> Path:
    """The shared library's file, in `folder` (the user's cache); builds it if it isn't there.

    `processor` is what the compiler's -march takes. Workers that start together may each build it:
    the file appears whole, under its own name.
    """
    compiler = find_compiler()
    folder = folder or cache_folder() / "native"
    flags = (*FLAGS, f"-march={processor}")
    target = folder / f"attention-{_key(compiler, flags)}.so"
    if not target.exists():
        began_s = time.monotonic()
        _build((compiler, *flags), target)
        log.info(
            "built the CPU attention kernel in %.1f s with %s, once for this host: %s",
            time.monotonic() - began_s,
            compiler,
            target,
        )
    return target


def _build(compiler: tuple[str, ...], target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            draft = Path(folder) / target.name
            _compile(compiler, draft)
            os.replace(draft, target)
    except OSError as error:
        raise BuildError(f"the kernel can't be kept in {target.parent}: {error}") from error


def _compile(compiler: tuple[str, ...], target: Path) -> None:
    command = [*compiler, "-o", str(target), str(SOURCE / "attention.cpp")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler[0]} did not end within {_TIMEOUT_S} s") from error
    if done.returncode != 0:
        first = next(iter(done.stderr.strip().splitlines()), f"exit status {done.returncode}")
        raise BuildError(f"{compiler[0]} could not build it ({first}): install g++ 10 or later")


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    digest = blake2b(digest_size=10)
    for part in (compiler, version, " ".join(flags), _processor()):
        digest.update(part.encode() + b"\0")
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    """What `-march=native` depends on."""
    names = ("model name", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(names)))
