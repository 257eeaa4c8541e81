"""Compiles a Triton kernel for a device that isn't here, with the types, constants and options of a
recorded launch, and reads from the result what a program of it needs."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("kvpool", "engine", "prefill_worker", "decode_worker", "router", "cluster")
_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "i8",
    torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    kernel: Any
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]


def recorded(launch: Callable[[], object]) -> list[Launch]:
    """What `launch` would launch. Tensors may be on the device "meta"."""
    found: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | named
        options = {n: given.pop(n) for n in set(given) - set(kernel.arg_names)}
        found.append(Launch(kernel=kernel, arguments=given, options=options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        launch()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Of a program: bytes of `shared` memory, columns of `tensor_memory`, 32-bit `registers` of a
    thread, and bytes of its `stack`, to which registers spill."""

    ptx: str
    shared: int
    tensor_memory: int
    registers: int
    stack: int


def compiled(launch: Launch, capability: int, folder: Path) -> Compiled:
    """For devices of a compute capability, 90 for 9.0. `folder` is for temporary files."""
    made = triton.compile(
        _source(launch), target=GPUTarget("cuda", capability, 32), options=dict(launch.options)
    )
    registers, stack = _resources(made.asm["cubin"], folder)
    return Compiled(
        ptx=str(made.asm["ptx"]),
        shared=made.metadata.shared,
        tensor_memory=made.metadata.tmem_size,
        registers=registers,
        stack=stack,
    )


def _source(launch: Launch) -> ASTSource:
    """As Triton specialises a launch: ones are constants, multiples of 16 are known as such."""
    names, values = launch.kernel.arg_names, launch.arguments
    fixed = {p.name for p in launch.kernel.params if p.is_constexpr or _is_one(values[p.name])}
    aligned = {n for n in names if n not in fixed and _is_aligned(values[n])}
    return ASTSource(
        fn=launch.kernel,
        signature={n: "constexpr" if n in fixed else _type(values[n]) for n in names},
        constexprs={(i,): values[n] for i, n in enumerate(names) if n in fixed},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in aligned},
    )


def _is_one(value: Any) -> bool:
    return type(value) is int and value == 1


def _is_aligned(value: Any) -> bool:
    """Memory is, where it begins."""
    if isinstance(value, torch.Tensor):
        return value.storage_offset() * value.element_size() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def _resources(cubin: bytes, folder: Path) -> tuple[int, int]:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", shown)
    assert found, shown
    return int(found[1]), int(found[2])


def written_kernels() -> set[str]:
    """All functions of the packages' sources that Triton compiles, as module.function."""
    paths = [p for package in _PACKAGES for p in sorted((_ROOT / package).rglob("*.py"))]
    return {name for path in paths for name in jitted(path.read_text(), _module(path))}


def _module(path: Path) -> str:
    return ".".join(path.relative_to(_ROOT).with_suffix("").parts)


def jitted(source: str, module: str) -> Iterator[str]:
    """Those of one module; also functions within functions."""
    if "triton" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list)):
            yield f"{module}.{node.name}"


def _is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called) in ("jit", "triton.jit")


def reached(kernels: Iterable[Any]) -> set[str]:
    """The kernels and the functions that they call, as module.function."""
    found: set[str] = set()
    waiting = list(kernels)
    while waiting:
        one = waiting.pop().fn
        name = f"{one.__module__}.{one.__name__}"
        if name not in found:
            found.add(name)
            used = (one.__globals__.get(n) for n in one.__code__.co_names)
            waiting += [other for other in used if isinstance(other, JITFunction)]
    return found
