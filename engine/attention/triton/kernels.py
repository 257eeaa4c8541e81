"""Triton kernels of paged attention; `triton_launch` launches them.

Planes are `[slots, kv_heads, dim]`, slot = block x BLOCK + offset. The rows of a query tile are
(token, head of the KV head's group), so that each key is read once for the whole group. Softmax is
kept in powers of two: `best` is the largest score, `mass` the sum of weights relative to it.
`queries`, `pieces`, `starts` and `joins` are those of `work`, int32.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def store_rows(
    fresh_keys,
    fresh_values,
    keys,
    values,
    slots,
    key_token,
    key_head,
    value_token,
    value_head,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """The new KV `[tokens, heads, dim]` into its slots; a slot of -1 is of a padded row."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        k = tl.arange(0, K_ROW)
        source = fresh_keys + token * key_token + (k // K_DIM) * key_head + k % K_DIM
        held = tl.load(source, mask=k < HEADS * K_DIM, other=0.0)
        target = keys + slot * (HEADS * K_DIM) + k
        tl.store(target, kept(held, keys.dtype.element_ty, LIMIT), mask=k < HEADS * K_DIM)
        v = tl.arange(0, V_ROW)
        source = fresh_values + token * value_token + (v // V_DIM) * value_head + v % V_DIM
        held = tl.load(source, mask=v < HEADS * V_DIM, other=0.0)
        target = values + slot * (HEADS * V_DIM) + v
        tl.store(target, kept(held, values.dtype.element_ty, LIMIT), mask=v < HEADS * V_DIM)


@triton.jit
def kept(numbers, kind: tl.constexpr, LIMIT: tl.constexpr):
    """As the plane keeps them: at most LIMIT, if that isn't 0."""
    if LIMIT > 0:
        numbers = tl.minimum(tl.maximum(numbers.to(tl.float32), -LIMIT), LIMIT)
    return numbers.to(kind)


@triton.jit
def attend_pieces(
    query, keys, values, out, parts, part_sizes, queries, pieces, starts, tables, sinks, scaling,
    softcap, query_row, query_head, out_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    K_TILE: tl.constexpr, V_TILE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program's stretch of the line. WINDOW 0: none. UPCAST: multiply in fp32."""
    program = tl.program_id(0)
    row = tl.arange(0, ROWS)
    k = tl.arange(0, K_TILE)
    v = tl.arange(0, V_TILE)
    for number in range(tl.load(starts + program), tl.load(starts + program + 1)):
        piece = pieces + number * 5
        tile = queries + tl.load(piece) * 4
        head, slot = tl.load(piece + 1), tl.load(piece + 4)
        first, end = tl.load(piece + 2), tl.load(piece + 3)
        tokens, position, table = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
        token = (tl.load(tile) + row // GROUP).to(tl.int64)
        query_of = head * GROUP + row % GROUP
        inside = row < tokens * GROUP
        at = query + token[:, None] * query_row + query_of[:, None] * query_head + k[None, :]
        asked = tl.load(at, mask=inside[:, None] & (k < K_DIM)[None, :], other=0.0)
        if UPCAST:
            asked = asked.to(tl.float32)
        seen_by = position + row // GROUP
        best = tl.full([ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        held = tl.zeros([ROWS, V_TILE], tl.float32)
        open_end = first
        if WINDOW == 0:
            open_end += tl.maximum(0, (tl.minimum(end, position + 1) - first) // KEYS) * KEYS
            for start in range(first, open_end, KEYS):
                best, mass, held = _meet(
                    asked, best, mass, held, keys, values, tables + table, start, end, head,
                    seen_by, k, v, scaling, softcap, KV_HEADS, K_DIM, V_DIM, K_TILE, V_TILE, KEYS,
                    BLOCK, WINDOW, HAS_CAP, PRECISION, False,
                )  # fmt: skip
        for start in range(open_end, end, KEYS):
            best, mass, held = _meet(
                asked, best, mass, held, keys, values, tables + table, start, end, head,
                seen_by, k, v, scaling, softcap, KV_HEADS, K_DIM, V_DIM, K_TILE, V_TILE, KEYS,
                BLOCK, WINDOW, HAS_CAP, PRECISION, True,
            )  # fmt: skip
        if slot < 0:
            if HAS_SINKS:
                best, mass, held = _sink(best, mass, held, sinks, query_of, inside)
            at = out + token[:, None] * out_row + (query_of * V_DIM)[:, None] + v[None, :]
            result = held / tl.where(mass > 0.0, mass, 1.0)[:, None]
            wanted = inside[:, None] & (v < V_DIM)[None, :]
            tl.store(at, result.to(out.dtype.element_ty), mask=wanted)
        else:
            part = slot.to(tl.int64) * ROWS + row
            _leave(parts, part_sizes, part, v, best, mass, held, V_TILE)


@triton.jit
def _leave(parts, part_sizes, part, v, best, mass, held, V_TILE: tl.constexpr):
    """For `join_parts`."""
    tl.store(part_sizes + part * 2, best)
    tl.store(part_sizes + part * 2 + 1, mass)
    tl.store(parts + part[:, None] * V_TILE + v[None, :], held)


@triton.jit
def _meet(
    asked, best, mass, held, keys, values, table, start, end, head, seen_by, k, v, scaling, softcap,
    KV_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_TILE: tl.constexpr,
    V_TILE: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys. Not MASKED: every row sees all of it."""
    position = start + tl.arange(0, KEYS)
    known = position < end
    if MASKED:
        block = tl.load(table + position // BLOCK, mask=known, other=0)
    else:
        block = tl.load(table + position // BLOCK)
    slot = block.to(tl.int64) * BLOCK + position % BLOCK
    at = keys + slot[:, None] * (KV_HEADS * K_DIM) + head * K_DIM + k[None, :]
    if MASKED or K_DIM < K_TILE:
        key = tl.load(at, mask=known[:, None] & (k < K_DIM)[None, :], other=0.0)
    else:
        key = tl.load(at)
    at = values + slot[:, None] * (KV_HEADS * V_DIM) + head * V_DIM + v[None, :]
    if MASKED or V_DIM < V_TILE:
        value = tl.load(at, mask=known[:, None] & (v < V_DIM)[None, :], other=0.0)
    else:
        value = tl.load(at)
    key, value = key.to(asked.dtype), value.to(asked.dtype)
    scores = tl.dot(asked, tl.trans(key), input_precision=PRECISION)
    factor = scaling * _LOG2E
    if HAS_CAP:
        scores, factor = _tanh(scores * (scaling / softcap)), softcap * _LOG2E
    if MASKED:
        seen = known[None, :] & (position[None, :] <= seen_by[:, None])
        if WINDOW > 0:
            seen &= position[None, :] > seen_by[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
    largest = tl.maximum(best, tl.max(scores, 1) * factor)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(scores * factor - base[:, None])  # one fused operation and a power
    shrink = tl.exp2(best - base)
    mass = mass * shrink + tl.sum(weights, 1)
    held = tl.dot(
        weights.to(value.dtype), value, acc=held * shrink[:, None], input_precision=PRECISION
    )
    return largest, mass, held


@triton.jit
def join_parts(
    out, parts, part_sizes, queries, joins, sinks, out_row,
    GROUP: tl.constexpr, V_DIM: tl.constexpr, V_TILE: tl.constexpr, ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr, PARTS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """AT_ONCE rows of a query tile that several pieces have worked on; PARTS of them at a time."""
    join, first_row = joins + tl.program_id(0) * 4, tl.program_id(1) * AT_ONCE
    head, first, count = tl.load(join + 1), tl.load(join + 2), tl.load(join + 3)
    tile = queries + tl.load(join) * 4
    rows = tl.load(tile + 1) * GROUP
    if (count > 0) & (first_row < rows):
        row = first_row + tl.arange(0, AT_ONCE)
        inside, v = row < rows, tl.arange(0, V_TILE)
        best = tl.full([AT_ONCE], float("-inf"), tl.float32)
        mass = tl.zeros([AT_ONCE], tl.float32)
        held = tl.zeros([AT_ONCE, V_TILE], tl.float32)
        for start in range(0, count, PARTS):
            number = start + tl.arange(0, PARTS)
            part = (first + number).to(tl.int64)[:, None] * ROWS + row[None, :]
            known = (number < count)[:, None] & inside[None, :]
            sizes = tl.load(part_sizes + part * 2, mask=known, other=float("-inf"))
            masses = tl.load(part_sizes + part * 2 + 1, mask=known, other=0.0)
            at = parts + part[:, :, None] * V_TILE + v[None, None, :]
            wanted = known[:, :, None] & (v < V_DIM)[None, None, :]
            found = tl.load(at, mask=wanted, other=0.0)
            largest = tl.maximum(best, tl.max(sizes, 0))
            base = tl.where(largest == float("-inf"), 0.0, largest)
            weights = tl.exp2(sizes - base[None, :])
            shrink = tl.exp2(best - base)
            mass = mass * shrink + tl.sum(weights * masses, 0)
            held = held * shrink[:, None] + tl.sum(weights[:, :, None] * found, 0)
            best = largest
        query_of = head * GROUP + row % GROUP
        if HAS_SINKS:
            best, mass, held = _sink(best, mass, held, sinks, query_of, inside)
        token = (tl.load(tile) + row // GROUP).to(tl.int64)
        at = out + token[:, None] * out_row + (query_of * V_DIM)[:, None] + v[None, :]
        result = held / tl.where(mass > 0.0, mass, 1.0)[:, None]
        wanted = inside[:, None] & (v < V_DIM)[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=wanted)


@triton.jit
def _sink(best, mass, held, sinks, query_of, inside):
    """A logit that takes weight and gives no value."""
    sink = tl.load(sinks + query_of, mask=inside, other=0.0).to(tl.float32) * _LOG2E
    largest = tl.maximum(best, sink)
    shrink = tl.exp2(best - largest)
    return largest, mass * shrink + tl.exp2(sink - largest), held * shrink[:, None]


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp2(tl.minimum(x, 30.0) * (2.0 * _LOG2E)) + 1.0)
