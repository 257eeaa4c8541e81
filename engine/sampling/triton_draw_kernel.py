"""The Triton kernel of `triton_draw`. Compiled without contracting a product with a sum."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.sampling.gumbel import LN2_HIGH, LN2_LOW, LOG_TAIL

_HIGH, _LOW = tl.constexpr(LN2_HIGH), tl.constexpr(LN2_LOW)
_T0, _T1, _T2, _T3, _T4, _T5, _T6 = (tl.constexpr(factor) for factor in LOG_TAIL)


@triton.jit
def draw_pieces(
    logits, keys, temperatures, scores, ids, vocab,
    COUNTERS: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The best score of a row's piece of 4 COUNTERS ids, and the first id that has it.

    `logits` `[rows, vocab]`, `keys` int32 `[rows, 4]`; `scores` and `ids` `[rows, pieces]`.
    """
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    low = tl.load(keys + row * 4).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(keys + row * 4 + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    block = piece * COUNTERS + tl.arange(0, COUNTERS)
    none = tl.zeros_like(block)
    choice, index = none + tl.load(keys + row * 4 + 2), none + tl.load(keys + row * 4 + 3)
    words = tl.philox((high << 32) | low, block, index, choice, none)
    temperature, mine = tl.load(temperatures + row), logits + row * vocab
    first = block // BLOCKS * GROUP + block % BLOCKS
    best = tl.full((COUNTERS,), float("-inf"), tl.float32)
    best_id = first
    for word in tl.static_range(4):
        at = first + word * BLOCKS
        logit = tl.load(mine + at, mask=at < vocab, other=float("-inf"))
        score = logit + temperature * _gumbel(words[word])
        best_id = tl.where(score > best, at, best_id)
        best = tl.maximum(score, best)
    top = tl.max(best, axis=0)
    place = row * tl.num_programs(1) + piece
    tl.store(scores + place, top)
    tl.store(ids + place, tl.min(tl.where(best == top, best_id, 0x7FFFFFFF), axis=0).to(tl.int64))


@triton.jit
def _gumbel(words):
    half = (words >> 1).to(tl.int32)
    near, is_near = _uniform(half), _uniform(half) < 0.25
    r, exponent = _parts(_uniform(0x7FFFFFFF - half))
    wait = -_log(tl.where(is_near, -near, r), tl.where(is_near, 0.0, exponent))
    r, exponent = _parts(wait)
    return -_log(r, exponent)


@triton.jit
def _uniform(half):
    return (half.to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31


@triton.jit
def _parts(values):
    bits = values.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    r = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    return r, exponent.to(tl.float32)


@triton.jit
def _log(r, exponent):
    square = r * r
    tail = r * _T0 + _T1
    tail = tail * r + _T2
    tail = tail * r + _T3
    tail = tail * r + _T4
    tail = tail * r + _T5
    tail = tail * r + _T6
    tail = tail * r * square + exponent * _LOW
    return (r + (tail - square * 0.5)) + exponent * _HIGH
