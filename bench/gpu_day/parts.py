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
    with small sizes and one thread, its Triton kernels interpreted with `interprets`."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    rehearsal: tuple[str, ...]
    interprets: bool = False

    def line(self, *, rehearses: bool) -> tuple[str, ...]:
        return (sys.executable, "-m", *(self.rehearsal if rehearses else self.command))

    def environment(self, *, rehearses: bool) -> dict[str, str]:
        if not rehearses:
            return {}
        return {"OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if self.interprets else {})


def _on_cuda(
    name: str, limit_s: float, *command: str, small: str = "--rehearse", interprets: bool = False
) -> Part:
    """`small`: further options of its rehearsal."""
    return Part(
        name=name,
        command=(*command, "--device=cuda"),
        limit_s=limit_s,
        rehearsal=(*command, "--device=cpu", *small.split()),
        interprets=interprets,
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

_TWO_WORKERS = "--rehearse --repeats=1 --only shm"

PARTS = (
    Part(name="tests", command=_TESTS, limit_s=300, rehearsal=_COLLECTED),
    _on_cuda("kernels", 90, "bench.engine.cuda.kernel_list", small="--rehearse --attention=auto"),
    _on_cuda("engine", 240, "bench.engine.speed", "--no-peers"),
    _on_cuda("chunks", 90, "bench.engine.cuda.ahead"),
    _on_cuda("backends", 90, "bench.engine.backends", interprets=True),
    _on_cuda("collate", 60, "bench.kvpool.collate", small="--tokens=64 --layers=1 --repeats=2"),
    _on_cuda(
        *("transfer", 120, "bench.transfer"),
        small="--tokens=256 --layers=1 --repeats=1 --only shm",
    ),
    _on_cuda("handoff", 150, "bench.transfer", "--handoff", small=_TWO_WORKERS),
    _on_cuda(
        *("timeline", 120, "bench.transfer", "--profile=build/handoff-cuda.json"),
        small=_TWO_WORKERS,
    ),
    _on_cuda("pull", 120, "bench.kvpool.pull", small="--tokens 64 256 --layers=2 --repeats=2"),
    _on_cuda("mixed", 60, "bench.engine.cuda.mixed_launches", interprets=True),
    _on_cuda("fp8", 60, "bench.engine.cuda.fp8_products", small="--rehearse --tokens 32"),
    _on_cuda("fp8-kv", 60, "bench.engine.cuda.fp8_kv", interprets=True),
    _on_cuda("vllm", 90, "bench.peer_vllm.on_device"),
    _on_cuda("ranks", 60, "bench.engine.ranks", small="--rehearse --repeats=1"),
    _on_cuda("tilings", 90, "bench.engine.cuda.attention_tilings", interprets=True),
)
