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
    """`command` is run by this Python, and ended after `limit_s`. `rehearsal` is the same on a CPU
    with small sizes; None: it makes no sense without a device."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    rehearsal: tuple[str, ...] | None = None

    def line(self, *, rehearses: bool) -> tuple[str, ...] | None:
        command = self.rehearsal if rehearses else self.command
        return None if command is None else (sys.executable, "-m", *command)


def _on_cuda(name: str, limit_s: float, *command: str, small: str | None = None) -> Part:
    """`small`: further options of its rehearsal."""
    return Part(
        name=name,
        command=(*command, "--device=cuda"),
        limit_s=limit_s,
        rehearsal=None if small is None else (*command, "--device=cpu", *small.split()),
    )


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

_COLLECTED = ("pytest", "-p", "no:benchmark", "-m", "gpu", "--collect-only", "-q", "tests/gpu")

PARTS = (
    Part(name="tests", command=_TESTS, limit_s=300, rehearsal=_COLLECTED),
    Part(name="kernels", command=("bench.engine.cuda.kernel_list",), limit_s=90),
    _on_cuda("engine", 240, "bench.engine.speed", "--no-peers"),
    _on_cuda("collate", 60, "bench.kvpool.collate", small="--tokens=64 --layers=1 --repeats=2"),
    _on_cuda(
        *("transfer", 180, "bench.transfer"),
        small="--tokens=256 --layers=1 --repeats=1 --only shm",
    ),
    _on_cuda("handoff", 180, "bench.transfer", "--handoff", small="--repeats=1 --only shm"),
    _on_cuda(
        *("timeline", 180, "bench.transfer", "--profile=build/handoff-cuda.json"),
        small="--repeats=1 --only shm",
    ),
    _on_cuda("pull", 120, "bench.kvpool.pull", small="--tokens 64 256 --layers=2 --repeats=2"),
    Part(name="mixed", command=("bench.engine.cuda.mixed_launches",), limit_s=60),
    Part(name="fp8", command=("bench.engine.cuda.fp8_products",), limit_s=60),
    Part(name="tilings", command=("bench.engine.cuda.attention_tilings",), limit_s=300),
)
