"""The parts of a day on a device, the most important first."""

from __future__ import annotations

import sys
from dataclasses import dataclass

GPU_TESTS = (
    "tests/gpu",
    "tests/contract",
    "tests/unit/test_layer_marks.py",
    "tests/unit/test_memory_collate.py",
    "tests/unit/test_memory_direct.py",
)
"""Where tests are that need a device: the others' imports need more than a device's machine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`command` is run by this Python, and ended after `limit_s`."""

    name: str
    command: tuple[str, ...]
    limit_s: float

    @property
    def line(self) -> tuple[str, ...]:
        return (sys.executable, "-m", *self.command)


def _on_cuda(name: str, limit_s: float, *command: str) -> Part:
    return Part(name=name, command=(*command, "--device=cuda"), limit_s=limit_s)


_TESTS = (
    "pytest",
    "-p",
    "no:benchmark",
    "-m",
    "gpu",
    "--numprocesses=12",
    "--timeout=120",
    *GPU_TESTS,
)

PARTS = (
    Part(name="tests", command=_TESTS, limit_s=300),
    Part(name="kernels", command=("bench.engine.cuda.kernel_list",), limit_s=90),
    _on_cuda("engine", 240, "bench.engine.speed", "--no-peers"),
    _on_cuda("collate", 60, "bench.kvpool.collate"),
    _on_cuda("transfer", 90, "bench.transfer"),
    _on_cuda("handoff", 180, "bench.transfer", "--handoff"),
    _on_cuda("timeline", 180, "bench.transfer", "--profile=build/handoff-cuda.json"),
    Part(name="tilings", command=("bench.engine.cuda.attention_tilings",), limit_s=300),
)
