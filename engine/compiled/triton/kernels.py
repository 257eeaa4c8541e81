"""Triton kernels of decoder layers' element-wise operations; `operations` launches them.

Sums are fp32, and what torch's operations would round is rounded, as in `source/rows.h`. The last
dimension of every tensor is dense; strides count numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.attention.triton.rotating_kernels import rotated


@triton.jit
def norm_rows(
    x, other, weight, total, out, heads, token_stride, head_stride, eps,
    WIDTH: tl.constexpr, TILE: tl.constexpr, ADDS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """The RMS norm of a row (token, head). ADDS: of the sum with `other`, which is kept in `total`;
    ROUNDS: before the weight."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    inside = at < WIDTH
    source = x + row // heads * token_stride + row % heads * head_stride + at
    value = tl.load(source, mask=inside, other=0.0)
    kind = value.dtype
    if ADDS:
        added = tl.load(other + row * WIDTH + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(kind)
        tl.store(total + row * WIDTH + at, value, mask=inside)
    wide = value.to(tl.float32)
    scaled = wide * (1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / WIDTH + eps))
    if ROUNDS:
        scaled = scaled.to(kind).to(tl.float32)
    factor = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + row * WIDTH + at, (scaled * factor).to(kind), mask=inside)


@triton.jit
def rotate_heads(
    x, cosines, sines, out, heads, token_stride, head_stride, angle_stride,
    HALF: tl.constexpr, HALF_TILE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a token, their rotary embedding; `out` `[tokens, heads, 2 HALF]`."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, HALF_TILE)
    is_near = at < HALF
    inside = (head < heads)[:, None] & is_near[None, :]
    source = x + token * token_stride + head[:, None] * head_stride + at[None, :]
    angle = token * angle_stride + at
    near, far = rotated(source, HALF, cosines + angle, sines + angle, inside, is_near)
    target = out + (token * heads + head[:, None]) * (2 * HALF) + at[None, :]
    tl.store(target, near, mask=inside)
    tl.store(target + HALF, far, mask=inside)


@triton.jit
def gate_rows(
    gate, up, out, gate_stride, up_stride, WIDTH: tl.constexpr, TILE: tl.constexpr,
    IS_GELU: tl.constexpr,
):  # fmt: skip
    """TILE numbers of a token: the activation of `gate`, times `up`; `out` `[tokens, WIDTH]`."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < WIDTH
    held = tl.load(gate + token * gate_stride + at, mask=inside, other=0.0)
    wide = held.to(tl.float32)
    if IS_GELU:
        inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
        active = wide * _sigmoid(2.0 * inner)
    else:
        active = wide * _sigmoid(wide)
    factor = tl.load(up + token * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    result = active.to(held.dtype).to(tl.float32) * factor
    tl.store(out + token * WIDTH + at, result.to(held.dtype), mask=inside)


@triton.jit
def _sigmoid(x):
    """Without a power that overflows."""
    power = tl.exp(-tl.abs(x))
    return tl.where(x >= 0.0, 1.0, power) / (1.0 + power)


@triton.jit
def scale_rows(rows, values, scales, row_stride, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """A row as e4m3, its largest number as 448, and the scale that undoes this."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full([TILE], 0.0, tl.float32)
    for start in range(0, WIDTH, TILE):
        at = start + tl.arange(0, TILE)
        held = tl.load(rows + row * row_stride + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(held))
    scale = tl.math.div_rn(tl.maximum(tl.max(largest, axis=0), 1e-12), 448.0)
    tl.store(scales + row, scale)
    for start in range(0, WIDTH, TILE):
        at = start + tl.arange(0, TILE)
        held = tl.load(rows + row * row_stride + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        scaled = tl.math.div_rn(held, tl.broadcast_to(scale, [TILE]))
        tl.store(values + row * WIDTH + at, scaled.to(tl.float8e4nv), mask=at < WIDTH)
