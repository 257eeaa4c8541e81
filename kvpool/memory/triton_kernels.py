"""Triton kernels that move one plane of a section between pool and slab, or two pools; see
`kvpool.memory.triton`.

In all of them `slots` is int32 `[tokens]`; a pool is `[layers, slots, POOL_ROW elements]` from the
first head that travels on, a slab `[layers, tokens, heads, dim]`; the two `_layer` strides are in
elements. Grids are (tokens, elements or heads, layers).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_rows(
    pool,
    slab,
    slots,
    tokens,
    pool_layer,
    slab_layer,
    POOL_ROW: tl.constexpr,
    ROW: tl.constexpr,
    TOKENS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    INTO_POOL: tl.constexpr,
):
    """Tiles of `[TOKENS, ELEMENTS]` of each token's ROW elements; converts where dtypes differ."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    layer = tl.program_id(2).to(tl.int64)
    inside = (token < tokens)[:, None] & (element < ROW)[None, :]
    slot = tl.load(slots + token, mask=token < tokens, other=0).to(tl.int64)
    in_pool = pool + layer * pool_layer + slot[:, None] * POOL_ROW + element[None, :]
    in_slab = slab + layer * slab_layer + token.to(tl.int64)[:, None] * ROW + element[None, :]
    if INTO_POOL:
        tl.store(in_pool, tl.load(in_slab, mask=inside).to(pool.dtype.element_ty), mask=inside)
    else:
        tl.store(in_slab, tl.load(in_pool, mask=inside).to(slab.dtype.element_ty), mask=inside)


@triton.jit
def move_rows(
    source, target, source_slots, target_slots, tokens, source_layer, target_layer,
    SOURCE_ROW: tl.constexpr, TARGET_ROW: tl.constexpr, ROW: tl.constexpr,
    TOKENS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """From pool to pool: tiles of `[TOKENS, ELEMENTS]` of each token's ROW elements."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    layer = tl.program_id(2).to(tl.int64)
    is_token = token < tokens
    inside = is_token[:, None] & (element < ROW)[None, :]
    theirs = tl.load(source_slots + token, mask=is_token, other=0).to(tl.int64)
    ours = tl.load(target_slots + token, mask=is_token, other=0).to(tl.int64)
    taken = source + layer * source_layer + theirs[:, None] * SOURCE_ROW + element[None, :]
    placed = target + layer * target_layer + ours[:, None] * TARGET_ROW + element[None, :]
    tl.store(placed, tl.load(taken, mask=inside), mask=inside)


@triton.jit
def encode_blocks(
    pool, values, scales, slots, tokens, pool_layer, values_layer, scales_layer,
    POOL_ROW: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    HEADS_TILE: tl.constexpr, DIM_TILE: tl.constexpr, SCALE_PER_LARGEST: tl.constexpr,
    LEAST_SCALE: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """One codec block of HEADS_TILE heads; `values` are int8 codes, whichever the codec."""
    in_pool, in_values, in_scales, inside, is_head = _places(
        slots, tokens, pool_layer, values_layer, scales_layer, POOL_ROW, HEADS, DIM, BLOCK,
        HEADS_TILE, DIM_TILE,
    )  # fmt: skip
    numbers = tl.load(pool + in_pool, mask=inside, other=0.0).to(tl.float32)
    largest = _largest(numbers)
    scale = tl.maximum(largest * SCALE_PER_LARGEST, LEAST_SCALE)
    scale = tl.where(largest == float("inf"), float("nan"), scale)
    tl.store(scales + in_scales, scale, mask=is_head)
    scaled = numbers * tl.div_rn(1.0, scale)[None, :, None]
    codes = _e4m3_codes(scaled) if IS_FP8 else _int8_codes(scaled)
    tl.store(values + in_values, codes, mask=inside)


@triton.jit
def decode_blocks(
    pool, values, scales, slots, tokens, pool_layer, values_layer, scales_layer,
    POOL_ROW: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    HEADS_TILE: tl.constexpr, DIM_TILE: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """The inverse of `encode_blocks`."""
    in_pool, in_values, in_scales, inside, is_head = _places(
        slots, tokens, pool_layer, values_layer, scales_layer, POOL_ROW, HEADS, DIM, BLOCK,
        HEADS_TILE, DIM_TILE,
    )  # fmt: skip
    codes = tl.load(values + in_values, mask=inside, other=0)
    scale = tl.load(scales + in_scales, mask=is_head, other=0.0)
    if IS_FP8:
        numbers, scale = _e4m3_as_float16(codes).to(tl.float32), scale * 256.0
    else:
        numbers = codes.to(tl.float32)
    numbers = (numbers * scale[None, :, None]).to(pool.dtype.element_ty)
    tl.store(pool + in_pool, numbers, mask=inside)


@triton.jit
def _places(
    slots, tokens, pool_layer, values_layer, scales_layer, POOL_ROW: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, HEADS_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
):  # fmt: skip
    """The places of a program's codec block, `[tokens, heads, dim]`, in the pool and in the slab's
    values, and of its scales `[heads]`; with masks of its existing tokens and heads."""
    block, layer = tl.program_id(0), tl.program_id(2).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE)
    column = tl.arange(0, DIM_TILE)
    slot = tl.load(slots + token, mask=token < tokens, other=0).to(tl.int64)
    element = head[None, :, None] * DIM + column[None, None, :]
    held = (head < HEADS)[None, :, None] & (column < DIM)[None, None, :]
    inside = (token < tokens)[:, None, None] & held
    in_pool = layer * pool_layer + slot[:, None, None] * POOL_ROW + element
    row = token.to(tl.int64)[:, None, None] * (HEADS * DIM)
    in_scales = layer * scales_layer + block.to(tl.int64) * HEADS + head
    return in_pool, layer * values_layer + row + element, in_scales, inside, head < HEADS


@triton.jit
def _largest(numbers):
    """`[tokens, heads, dim]` to `[heads]` magnitudes; infinite if any element isn't finite."""
    magnitudes = tl.abs(numbers)
    magnitudes = tl.where(magnitudes <= 3.4028234663852886e38, magnitudes, float("inf"))
    return tl.max(tl.max(magnitudes, axis=2), axis=0)


@triton.jit
def _int8_codes(scaled):
    """Rounds to nearest, ties to even: adding 1.5 x 2^23 leaves no bits for a fraction."""
    return ((scaled + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def _e4m3_codes(scaled):
    """Rounds to nearest, ties to even, on devices without fp8 too; magnitudes are at most 448."""
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (tl.abs(scaled) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)  # below 2^-6
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def _e4m3_as_float16(codes):
    """A 256th of each number, exact: its bits, shifted to float16's places."""
    return ((codes.to(tl.int16) << 7) & -0x4001).to(tl.float16, bitcast=True)
