"""Compiles the attention kernels for two generations of devices, as launched for Llama-3.1-8B and
for odd shapes, and checks how they reach memory and which products they use: run by `test_triton`
in a process of its own; needs no device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention.triton.kernels import attend_pieces, join_parts, store_rows
from engine.attention.triton.launch import ROUNDED
from engine.attention.triton.rotating_kernels import rotate_and_store_rows
from engine.attention.triton.work import Tiling, chunk_tiling, decode_tiling

_POINTERS = {
    "query": "16", "keys": "kv", "values": "kv", "out": "16", "fresh_keys": "16",
    "fresh_values": "16", "parts": "*fp32", "part_sizes": "*fp32", "queries": "*i32",
    "pieces": "*i32", "starts": "*i32", "joins": "*i32", "tables": "*i32", "slots": "*i32",
    "sinks": "16", "key": "16", "value": "16", "cosines": "16", "sines": "16",
}  # fmt: skip
_NUMBERS = {
    "scaling": "fp32", "softcap": "fp32", "query_row": "i32", "query_head": "i32",
    "out_row": "i32", "key_token": "i32", "key_head": "i32", "value_token": "i32",
    "value_head": "i32", "query_token": "i32", "angle_token": "i32",
}  # fmt: skip
_SHARED = {80: 164 << 10, 90: 228 << 10}
"""Bytes of a multiprocessor's shared memory."""
_RESERVED = 1 << 10
"""Of them for each program."""
_NOT_ALIGNED = {"scaling", "softcap"}


def _compiled(  # type: ignore[no-untyped-def]
    kernel,
    dtype: str,
    constants: Mapping[str, object],
    capability: int,
    *,
    kept: str | None = None,
    **options: int,
) -> Any:
    """`kept`: the planes' dtype, if another."""
    names = kernel.arg_names
    pointers = {"16": f"*{dtype}", "kv": f"*{kept or dtype}"}
    kinds = {n: pointers.get(k, k) for n, k in _POINTERS.items()} | _NUMBERS
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else kinds[n] for n in names},
        constexprs={(names.index(n),): v for n, v in constants.items() if n in names},
        attrs={
            (names.index(n),): [["tt.divisibility", 16]]
            for n in names
            if n not in constants and n not in _NOT_ALIGNED
        },
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options)


def _shape(dim: int, tiling: Tiling, **changes: object) -> dict[str, object]:
    tile = max(16, triton.next_power_of_2(dim))
    shape = {
        "KV_HEADS": 8, "GROUP": 4, "K_DIM": dim, "V_DIM": dim, "K_TILE": tile, "V_TILE": tile,
        "ROWS": tiling.rows, "KEYS": tiling.keys, "BLOCK": 16, "WINDOW": 0, "HAS_CAP": False,
        "HAS_SINKS": False, "UPCAST": False, "PRECISION": "ieee",
    }  # fmt: skip
    return {**shape, **changes}


def _tilings(dim: int, element_bytes: int) -> tuple[Tiling, Tiling]:
    return decode_tiling(4, dim, element_bytes), chunk_tiling(512, 4, dim, element_bytes)


def _attend(
    dtype: str,
    dim: int,
    capability: int,
    tiling: Tiling,
    *,
    kept: str | None = None,
    **changes: object,
) -> str:
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    shape = _shape(dim, tiling, **changes)
    used = {n: v for n, v in shape.items() if n in attend_pieces.arg_names}
    found = _compiled(attend_pieces, dtype, used, capability, kept=kept, **options)
    shared = tiling.per_processor * (found.metadata.shared + _RESERVED)
    assert shared <= _SHARED[capability], (tiling, shared)
    return str(found.asm["ptx"])


def _check_attend(capability: int) -> None:
    """Keys and values come 16 bytes at a time, behind the products, which matrix units make."""
    for_chunks = "wgmma.mma_async" if capability == 90 else "mma.sync"
    for tiling, product in zip(_tilings(128, 2), ("mma.sync", for_chunks), strict=True):
        ptx = _attend("bf16", 128, capability, tiling)
        widths = set(re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, (0x\w+|\d+)", ptx))
        assert "0x10" in widths and widths <= {"0x10", "0x4"}, widths  # 4: block tables
        assert product in ptx, f"no {product} for {tiling}"
        assert ".local" not in ptx, "an array in local memory"


def _check_shapes() -> None:
    """That they compile at all."""
    options = {"WINDOW": 40, "HAS_CAP": True, "HAS_SINKS": True}
    for tiling in _tilings(80, 2):
        _attend("fp16", 80, 90, tiling, BLOCK=11, **options)
    for tiling in _tilings(64, 4):
        _attend("fp32", 64, 90, tiling)
    _attend("bf16", 256, 90, _tilings(256, 2)[1], **options)
    for tiling in _tilings(128, 1):
        _attend("bf16", 128, 90, tiling, kept="fp8e4nv")
    shape = {**_shape(80, _tilings(80, 2)[0]), "HAS_SINKS": True}
    for rows, parts in ((1, 16), (16, 1)):
        joined = {n: v for n, v in shape.items() if n in join_parts.arg_names}
        at_once = {"AT_ONCE": rows, "PARTS": parts}
        _compiled(join_parts, "bf16", {**joined, **at_once}, 90, num_warps=4)


def _check_store() -> None:
    shape = {"HEADS": 8, "K_DIM": 128, "V_DIM": 128, "K_ROW": 1024, "V_ROW": 1024}
    ptx = str(_compiled(store_rows, "bf16", {**shape, "LIMIT": 0.0}, 90, num_warps=4).asm["ptx"])
    _compiled(store_rows, "bf16", {**shape, "LIMIT": 448.0}, 90, kept="fp8e4nv", num_warps=4)
    widths = set(re.findall(r"st\.global\.((?:v\d\.)?b\d+)", ptx))
    assert widths <= {"v4.b32", "v2.b64"}, widths


def _check_rotate() -> None:
    """Products are rounded before they are added; nearly all accesses are 16 bytes wide."""
    shape = {
        "HEADS": 32, "KV_HEADS": 8, "HALF": 64, "HALF_TILE": 64, "V_DIM": 128, "V_ROW": 1024,
        "AT_ONCE": 16,
    }  # fmt: skip
    for kept, limit in ((None, 0.0), ("fp8e4nv", 448.0)):
        constants = {**shape, "LIMIT": limit}
        rotate = _compiled(
            rotate_and_store_rows, "bf16", constants, 90, kept=kept, num_warps=4, **ROUNDED
        )
        ptx = str(rotate.asm["ptx"])
        assert not re.search(r"\bfma\.", ptx), "a product is added before it is rounded"
        widths = set(re.findall(r"st\.global\.((?:v\d\.)?b\d+)", ptx))
        assert widths & {"v4.b32", "v2.b64"}, widths


def main() -> None:
    for capability in (80, 90):
        _check_attend(capability)
    _check_shapes()
    _check_store()
    _check_rotate()


if __name__ == "__main__":
    main()
