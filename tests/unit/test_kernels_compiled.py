"""The Triton kernels, compiled for devices that aren't here: A100 (8.0), H100 (9.0), B200 (10.0).

Each compiles as it is launched, as many programs as meant share a multiprocessor, nothing spills,
and its code reaches memory and multiplies as meant. What a kernel computes is `test_triton`'s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="no Triton for this platform")

# isort: split
from engine.attention.triton.work import Tiling, chunk_tiling, decode_tiling
from engine.model.interface import Scores
from kvpool.core.layout.codec import Codec
from tests.unit import kernel_launches as launches
from tests.unit.compile_kit import (
    Compiled,
    Launch,
    compiled,
    jitted,
    reached,
    recorded,
    written_kernels,
)

TARGETS = (80, 90, 100)
_SHARED = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
"""Bytes of a multiprocessor's shared memory."""
_RESERVED = 1 << 10
"""Of them for each program."""
_TENSOR_COLUMNS, _REGISTERS = 512, 64 << 10
"""Of a multiprocessor."""
_WIDE = {"v4.b32", "v2.b64"}
_FP8 = torch.float8_e4m3fn
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_ALL_SCORES = Scores(scaling=0.125, window=40, softcap=30.0, sinks=launches.empty(launches.HEADS))

Check = Callable[[str, int], None]
"""Of PTX and the capability."""


def _accesses(ptx: str) -> set[tuple[str, bool]]:
    """("ld" or "st", are they 16 bytes wide) of all accesses to device memory."""
    found = re.findall(r"(ld|st)\.global\.(?:L1::\w+\.)?((?:v\d\.)?b\d+)", ptx)
    return {(way, width in _WIDE) for way, width in found}


def _moves(narrow: set[str], ptx: str, _: int) -> None:
    """All accesses are 16 bytes wide, but some `narrow` ones."""
    assert _accesses(ptx) == {("ld", True), ("st", True)} | {(way, False) for way in narrow}


_NEUTRAL = {"-2147450880", "-1082081408", "1065369472"}
"""Pairs of bfloat16: -0, -1 and 1. 8.0 has no plain product or sum of them."""


def _rounds(ptx: str, _: int) -> None:
    """No product is added before it is rounded."""
    constants = re.findall(r"mov\.b32\s+(%r\d+), (-?\d+);", ptx)
    neutral = {register for register, value in constants if value in _NEUTRAL}
    for operands in re.findall(r"\bfma\.\S+\s+\S+ (.*);", ptx):
        assert neutral & set(operands.split(", ")), operands


def _stores_wide(ptx: str, _: int) -> None:
    assert {wide for way, wide in _accesses(ptx) if way == "st"} == {True}


def _stores_mostly_wide(ptx: str, _: int) -> None:
    assert ("st", True) in _accesses(ptx)


def _draws(ptx: str, _: int) -> None:
    """The noise is that of a CPU."""
    assert "mul.f32" in ptx or "mul.rn.f32" in ptx
    assert not re.findall(r"\bfma\.\S*f32|\bmad\.\S*f32|\.ftz\b|\.approx\b", ptx)


def _multiplies(products: Mapping[int, str], ptx: str, capability: int) -> None:
    """Keys and values come 16 bytes at a time, behind the products, which matrix units make."""
    widths = set(re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, (0x\w+|\d+)", ptx))
    assert "0x10" in widths and widths <= {"0x10", "0x4"}, widths  # 4: block tables
    assert products[capability] in ptx
    assert ".local" not in ptx, "an array in local memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One specialisation of a kernel. `short`: the targets of `make test`; the others are long.
    `spilled`: # target |-> most bytes of a thread that don't fit its registers. `alone`: targets
    where fewer than `per_processor` programs fit a multiprocessor."""

    launch: launches.Call
    kernel: str
    checks: Sequence[Check] = ()
    short: Sequence[int] = TARGETS
    targets: Sequence[int] = TARGETS
    per_processor: int = 1
    spilled: Mapping[int, int] = field(default_factory=dict)
    alone: Sequence[int] = ()

    def launched(self) -> Launch:
        return next(one for one in recorded(self.launch) if one.kernel.__name__ == self.kernel)


def _form(kernel: str, launch: launches.Call, *checks: Check, **others: object) -> Form:
    return Form(kernel=kernel, launch=launch, checks=checks, **others)


def _attended(dtype: torch.dtype, tiling: Tiling, *checks: Check, **changes: object) -> Form:
    others = {n: changes.pop(n) for n in ("short", "targets", "spilled", "alone") if n in changes}
    others["per_processor"] = tiling.per_processor
    launch = launches.attended(dtype, tiling, **changes)
    return _form("attend_pieces", launch, *checks, **others)


def _decode(dim: int, element_bytes: int) -> Tiling:
    return decode_tiling(launches.GROUP, dim, element_bytes)


def _chunk(dim: int, element_bytes: int) -> Tiling:
    return chunk_tiling(512, launches.GROUP, dim, element_bytes)


_DECODES = partial(_multiplies, dict.fromkeys(TARGETS, "mma.sync"))
_CHUNKS = partial(_multiplies, {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"})
_LOADS_SLOTS, _LOADS_SLOTS_STORES_SCALES = partial(_moves, {"ld"}), partial(_moves, {"ld", "st"})
_LONG = {"short": ()}
_WITH_FP8 = {"targets": (90, 100), "short": (90, 100)}
_WITHOUT_MATRIX_UNITS = {"short": (), "spilled": {80: 16 << 10, 90: 2 << 10, 100: 2 << 10}}
_80_DIMS = {"dim": 80, "block": 11, "scores": _ALL_SCORES}


def _moving(*formats: object, into_pool: bool) -> launches.Call:
    return launches.moved(_BF16, *formats, into_pool=into_pool)


_MOVES = {
    "copy in": _form("copy_rows", _moving(_BF16, into_pool=True), _LOADS_SLOTS),
    "copy out": _form("copy_rows", _moving(_BF16, into_pool=False), _LOADS_SLOTS),
    "convert": _form("copy_rows", _moving(_FP32, into_pool=False), _LOADS_SLOTS),
    "between pools": _form("move_rows", launches.moved_between_pools, _LOADS_SLOTS),
}
for _codec, _values in ((Codec.FP8, _FP8), (Codec.INT8, torch.int8)):
    _MOVES |= {
        f"encode {_codec}": _form(
            "encode_blocks", _moving(_values, _codec, into_pool=False),
            _LOADS_SLOTS_STORES_SCALES, _rounds,
        ),
        f"decode {_codec}": _form(
            "decode_blocks", _moving(_values, _codec, into_pool=True), _LOADS_SLOTS, _rounds
        ),
    }  # fmt: skip
_ATTENDS = {
    "decode": _attended(_BF16, _decode(128, 2), _DECODES),
    "chunk": _attended(_BF16, _chunk(128, 2), _CHUNKS, spilled={100: 64}),
    "decode of fp8": _attended(
        _BF16, _decode(128, 1), kept=_FP8, scores=_ALL_SCORES, **_WITH_FP8
    ),
    "chunk of fp8": _attended(_BF16, _chunk(128, 1), kept=_FP8, **_WITH_FP8 | _LONG),
    "decode of 80 dims": _attended(_FP16, _decode(80, 2), **_80_DIMS, short=(80,)),
    "chunk of 80 dims": _attended(_FP16, _chunk(80, 2), **_80_DIMS, **_LONG),
    "chunk of 256 dims": _attended(
        _BF16, _chunk(256, 2), dim=256, scores=_ALL_SCORES, spilled={80: 128, 100: 512},
        alone=(100,), **_LONG,
    ),
    "decode in fp32": _attended(_FP32, _decode(64, 4), dim=64, **_WITHOUT_MATRIX_UNITS),
    "chunk in fp32": _attended(_FP32, _chunk(64, 4), dim=64, **_WITHOUT_MATRIX_UNITS),
    "join of a step": _form(
        "join_parts",
        launches.attended(_BF16, _decode(128, 2), joined_rows=4, scores=_ALL_SCORES),
    ),
    "join of a chunk": _form("join_parts", launches.attended(_BF16, _chunk(128, 2))),
    "store": _form("store_rows", launches.stored(_BF16), _stores_wide),
    "store fp8": _form("store_rows", launches.stored(_FP8), **_WITH_FP8),
    "rotate and store": _form(
        "rotate_and_store_rows", launches.rotated_and_stored(_BF16), _rounds, _stores_mostly_wide
    ),
    "rotate and store fp8": _form(
        "rotate_and_store_rows", launches.rotated_and_stored(_FP8), _rounds, _stores_mostly_wide,
        **_WITH_FP8,
    ),
}  # fmt: skip
_OPERATIONS = {
    "norm": _form("norm_rows", partial(launches.normed, _BF16), _stores_wide),
    "norm that rounds": _form(
        "norm_rows", partial(launches.normed, _BF16, rounds=True), _stores_wide, **_LONG
    ),
    "norm in fp32": _form("norm_rows", partial(launches.normed, _FP32), _stores_wide),
    "sum and norm": _form("norm_rows", launches.summed_and_normed, _stores_wide),
    "rotate": _form("rotate_heads", launches.rotated, _rounds, _stores_wide),
    "silu": _form("gate_rows", partial(launches.gated, _BF16, is_gelu=False), _stores_wide),
    "gelu in fp32": _form("gate_rows", partial(launches.gated, _FP32, is_gelu=True), _stores_wide),
    "rows to fp8": _form("scale_rows", launches.scaled, **_WITH_FP8),
    "draw": _form("draw_pieces", launches.drawn, _draws),
}
_FORMS = _MOVES | _ATTENDS | _OPERATIONS


def _cases() -> Iterator[object]:
    for name, form in _FORMS.items():
        for target in form.targets:
            marks = () if target in form.short else pytest.mark.long
            yield pytest.param(form, target, id=f"{name}-{target}", marks=marks)


@pytest.mark.parametrize(("form", "target"), list(_cases()))
def test_a_kernel_compiles_as_it_is_launched(
    form: Form, target: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launch = form.launched()
    made = compiled(launch, target, tmp_path)
    programs = 1 if target in form.alone else form.per_processor
    _check_fits(made, target, programs=programs, warps=int(launch.options["num_warps"]))
    assert made.stack <= form.spilled.get(target, 0), "registers spill"
    for check in form.checks:
        check(made.ptx, target)


def _check_fits(made: Compiled, target: int, *, programs: int, warps: int) -> None:
    registers = -(-made.registers // 8) * 8 * 32 * warps
    assert programs * (made.shared + _RESERVED) <= _SHARED[target], made.shared
    assert programs * made.tensor_memory <= _TENSOR_COLUMNS, made.tensor_memory
    assert programs * registers <= _REGISTERS, made.registers


_NEED_FP8 = {"engine.compiled.triton.kernels.scale_rows"}


@pytest.mark.parametrize("target", TARGETS)
def test_no_kernel_is_left_out(target: int) -> None:
    """Of `make test`, not of the long forms."""
    kernels = [form.launched().kernel for form in _FORMS.values() if target in form.short]
    assert reached(kernels) == written_kernels() - (_NEED_FP8 if target == 80 else set())


def test_all_ways_to_write_a_kernel_are_seen() -> None:
    source = """
import triton
from triton import jit
@triton.autotune(configs=[])
@triton.jit
def first(): ...
def around():
    @jit(noinline=True)
    def second(): ...
@torch.jit.script
def third(): ...
"""
    assert sorted(jitted(source, "m")) == ["m.first", "m.second"]
