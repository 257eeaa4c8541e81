"""Compiles the draw's kernel for two generations of devices: no product may be contracted with a
sum, or its noise would not be that of a CPU. Run by `test_triton`; needs no device."""

from __future__ import annotations

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.sampling.triton_draw import OPTIONS, TILE
from engine.sampling.triton_draw_kernel import draw_pieces

_ARGUMENTS = {
    "logits": "*fp32",
    "keys": "*i32",
    "temperatures": "*fp32",
    "scores": "*fp32",
    "ids": "*i64",
    "vocab": "i32",
}


def _ptx(capability: int, options: dict[str, object]) -> str:
    names = draw_pieces.arg_names
    source = ASTSource(
        fn=draw_pieces,
        signature={name: _ARGUMENTS.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in TILE.items()},
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return str(made.asm["ptx"])


def main() -> None:
    for capability in (80, 90):
        ptx = _ptx(capability, dict(OPTIONS))
        assert "mul.f32" in ptx or "mul.rn.f32" in ptx
        assert not re.findall(r"\bfma\.\S*f32|\bmad\.\S*f32|\.ftz\b|\.approx\b", ptx)
    assert "fma.rn.f32" in _ptx(90, {}), "the option is what keeps them apart"


if __name__ == "__main__":
    main()
