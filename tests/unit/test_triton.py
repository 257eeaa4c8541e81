"""The Triton kernels without a device, interpreted in a process of their own; what they become on
one is `test_kernels_compiled`'s."""

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
        timeout=600,
    )
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.processes
@pytest.mark.timeout(700)
@pytest.mark.parametrize("chosen", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_kernels_interpreted_on_the_cpu(chosen: str) -> None:
    tests = [str(path) for path in sorted(Path(__file__).parent.glob("*_interpreted.py"))]
    arguments = ["-m", "pytest", *tests, "-p", "no:cacheprovider", "-m", chosen]
    _run(arguments, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
