"""The Triton kernels without a device: interpreted, in a process of their own, and compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no Triton for this platform")
_ROOT = Path(__file__).parents[2]


def _run(arguments: list[str], **environment: str) -> None:
    found = subprocess.run(
        [sys.executable, *arguments],
        cwd=_ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_kernels_interpreted_on_the_cpu() -> None:
    tests = ["tests/unit/triton_interpreted.py", "-p", "no:cacheprovider"]
    _run(["-m", "pytest", *tests], TRITON_INTERPRET="1")


def test_kernels_compiled_for_devices_make_16_byte_accesses(tmp_path: Path) -> None:
    _run(["-m", "tests.unit.triton_compiled"], TRITON_CACHE_DIR=str(tmp_path))
