"""Compiles the kernels for two generations of devices, as launched for Llama-3.1-8B's layout, and
checks how they reach memory: run by `test_triton` in a process of its own; needs no device."""

from __future__ import annotations

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpool.memory.triton import ROUNDED
from kvpool.memory.triton_kernels import copy_rows, decode_blocks, encode_blocks, move_rows

_WIDE = {"v4.b32", "v2.b64"}
_COPY_ARGUMENTS = {"slots": "*i32", "tokens": "i32", "pool_layer": "i32", "slab_layer": "i32"}
_CODEC_ARGUMENTS = {
    "pool": "*bf16",
    "values": "*i8",
    "scales": "*fp32",
    "slots": "*i32",
    "tokens": "i32",
    "pool_layer": "i32",
    "values_layer": "i32",
    "scales_layer": "i32",
}
_CODEC = {"POOL_ROW": 1024, "HEADS": 8, "DIM": 128, "BLOCK": 16, "HEADS_TILE": 4, "DIM_TILE": 128}
_RULE = {"SCALE_PER_LARGEST": 1 / 448, "LEAST_SCALE": 2.0**-126}


def _accesses(kernel, arguments, constants, capability: int) -> list[tuple[str, str]]:  # type: ignore[no-untyped-def]
    """("ld" or "st", width) of all accesses to device memory, from its PTX."""
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: arguments.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name in arguments
            if name != "tokens"
        },
    )
    target = GPUTarget("cuda", capability, 32)
    ptx = triton.compile(source, target=target, options=ROUNDED).asm["ptx"]
    assert not re.search(r"\bfma\.", ptx), "a product is added before it is rounded"
    return re.findall(r"(ld|st)\.global\.(?:L1::\w+\.)?((?:v\d\.)?b\d+)", ptx)


def _check(kernel, arguments, constants, narrow: set[str]) -> None:  # type: ignore[no-untyped-def]
    """All stores are 16 bytes wide, but scales; all loads, but slots and scales."""
    for capability in (80, 90):
        found = _accesses(kernel, arguments, constants, capability)
        assert {way for way, width in found if width in _WIDE} == {"ld", "st"}, found
        assert {way for way, width in found if width not in _WIDE} == narrow, found


def main() -> None:
    for into_pool in (False, True):
        words = {"pool": "*i64", "slab": "*i64", **_COPY_ARGUMENTS}
        tile = {"POOL_ROW": 256, "ROW": 256, "TOKENS": 8, "ELEMENTS": 256}
        _check(copy_rows, words, {**tile, "INTO_POOL": into_pool}, {"ld"})
    converted = {"pool": "*bf16", "slab": "*fp32", **_COPY_ARGUMENTS}
    tile = {"POOL_ROW": 1024, "ROW": 1024, "TOKENS": 4, "ELEMENTS": 1024}
    _check(copy_rows, converted, {**tile, "INTO_POOL": False}, {"ld"})
    moved = dict.fromkeys(("source", "target"), "*i64")
    slots = dict.fromkeys(("source_slots", "target_slots"), "*i32")
    numbers = dict.fromkeys(("tokens", "source_layer", "target_layer"), "i32")
    tile = {"SOURCE_ROW": 256, "TARGET_ROW": 256, "ROW": 256, "TOKENS": 8, "ELEMENTS": 256}
    _check(move_rows, {**moved, **slots, **numbers}, tile, {"ld"})
    for is_fp8 in (False, True):
        shape = {**_CODEC, "IS_FP8": is_fp8}
        _check(encode_blocks, _CODEC_ARGUMENTS, {**shape, **_RULE}, {"ld", "st"})
        _check(decode_blocks, _CODEC_ARGUMENTS, shape, {"ld"})


if __name__ == "__main__":
    main()
