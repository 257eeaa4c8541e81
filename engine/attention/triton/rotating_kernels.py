"""Triton kernels that rotate queries and keys (rotary embeddings), and store the new KV beside it.

A decode step is many small kernels: rotating queries, rotating keys and storing KV are one here.
What torch's operations would round is rounded; `launch` launches them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.attention.triton.kernels import kept


@triton.jit
def rotated(source, far, cosines, sines, inside, is_near):
    """Both halves of rows of heads (arXiv:2104.09864 §3.4.2, halves instead of pairs). `source`:
    pointers to the near halves; `cosines`, `sines`: to the token's angles; `far`: their width."""
    near = tl.load(source, mask=inside, other=0.0)
    distant = tl.load(source + far, mask=inside, other=0.0)
    near_cos = tl.load(cosines, mask=is_near, other=0.0)[None, :]
    near_sin = tl.load(sines, mask=is_near, other=0.0)[None, :]
    far_cos = tl.load(cosines + far, mask=is_near, other=0.0)[None, :]
    far_sin = tl.load(sines + far, mask=is_near, other=0.0)[None, :]
    first = _product(near, near_cos) - _product(distant, near_sin)
    second = _product(distant, far_cos) + _product(near, far_sin)
    return first.to(near.dtype), second.to(near.dtype)


@triton.jit
def _product(x, y):
    """Rounded to the numbers' own kind, in fp32."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def rotate_and_store_rows(
    query, key, value, cosines, sines, out, keys, values, slots,
    query_token, query_head, key_token, key_head, value_token, value_head, angle_token,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_TILE: tl.constexpr,
    V_DIM: tl.constexpr, V_ROW: tl.constexpr, AT_ONCE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """A token's queries go to `out` `[tokens, heads, 2 HALF]`, its keys and values to their slot;
    AT_ONCE heads a program, the last one has the values. A slot of -1 is of a padded row."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_parts: tl.constexpr = (HEADS + AT_ONCE - 1) // AT_ONCE
    key_parts: tl.constexpr = (KV_HEADS + AT_ONCE - 1) // AT_ONCE
    slot = tl.load(slots + token).to(tl.int64)
    angles, sin_angles = cosines + token * angle_token, sines + token * angle_token
    if part < query_parts:
        _rotate(
            query + token * query_token, query_head, angles, sin_angles,
            out + token * (HEADS * 2 * HALF), part, True, HEADS, HALF, HALF_TILE, AT_ONCE, 0.0,
        )  # fmt: skip
    elif part < query_parts + key_parts:
        _rotate(
            key + token * key_token, key_head, angles, sin_angles,
            keys + slot * (KV_HEADS * 2 * HALF), part - query_parts, slot >= 0,
            KV_HEADS, HALF, HALF_TILE, AT_ONCE, LIMIT,
        )  # fmt: skip
    else:
        v = tl.arange(0, V_ROW)
        inside = (v < KV_HEADS * V_DIM) & (slot >= 0)
        source = value + token * value_token + (v // V_DIM) * value_head + v % V_DIM
        held = tl.load(source, mask=inside, other=0.0)
        target = values + slot * (KV_HEADS * V_DIM) + v
        tl.store(target, kept(held, values.dtype.element_ty, LIMIT), mask=inside)


@triton.jit
def _rotate(
    rows, row, cosines, sines, target, part, is_kept,
    HEADS: tl.constexpr, HALF: tl.constexpr, HALF_TILE: tl.constexpr, AT_ONCE: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """The `part`-th AT_ONCE heads of a token, to a dense target."""
    head = part * AT_ONCE + tl.arange(0, AT_ONCE)
    at = tl.arange(0, HALF_TILE)
    is_near = at < HALF
    inside = (head < HEADS)[:, None] & is_near[None, :] & is_kept
    source = rows + head[:, None] * row + at[None, :]
    near, far = rotated(source, HALF, cosines + at, sines + at, inside, is_near)
    places = target + head[:, None] * (2 * HALF) + at[None, :]
    tl.store(places, kept(near, target.dtype.element_ty, LIMIT), mask=inside)
    tl.store(places + HALF, kept(far, target.dtype.element_ty, LIMIT), mask=inside)
