"""Finds the coefficients of step times from timed steps, and chooses the steps to time. Pure.

Non-negative least squares of relative errors: Lawson and Hanson, Solving Least Squares Problems
(1974), chapter 23.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from engine.core.step_times import LinearTimes, StepWork, decode_work, prefill_work

_Floats = NDArray[np.float64]

_TOLERANCE = 1e-10


def relative_least_squares(rows: _Floats, seconds: _Floats) -> _Floats:
    """The x >= 0 that makes `rows @ x / seconds` nearest to ones. `rows` `[samples, columns]`,
    `seconds` positive; a column of zeros gets 0."""
    relative = rows / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    found: _Floats = _nnls(relative / scale, np.ones(len(seconds))) / scale
    return found


def _nnls(matrix: _Floats, target: _Floats) -> _Floats:
    x = np.zeros(matrix.shape[1])
    free = np.zeros(len(x), dtype=bool)
    for _ in range(3 * len(x)):
        gain = np.where(free, -np.inf, matrix.T @ (target - matrix @ x))
        if gain.max(initial=-np.inf) <= _TOLERANCE:
            break
        free[gain.argmax()] = True
        x = _settle(matrix, target, x, free)
    return x


def _settle(matrix: _Floats, target: _Floats, x: _Floats, free: NDArray[np.bool_]) -> _Floats:
    """Solves for the free coefficients; those that would become negative on the way are fixed at
    0."""
    while True:
        solved = np.zeros_like(x)
        solved[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        falling = free & (solved <= 0)
        if not falling.any():
            return solved
        share = (x[falling] / (x[falling] - solved[falling])).min()
        x = x + share * (solved - x)
        free &= x > _TOLERANCE


_HELD_OUT_EVERY = 4


@dataclass(frozen=True, slots=True)
class Timed:
    """A step of prompts or a step of decodes, and its seconds."""

    work: StepWork
    seconds: float


def fit_times(timed: Sequence[Timed]) -> LinearTimes:
    """Each work appears once. The error is that of a fit without every fourth work, on these."""
    prefill = [one for one in timed if one.work.prefill_tokens]
    decode = sorted(
        (one for one in timed if not one.work.prefill_tokens),
        key=lambda one: one.work.decode_sequences,
    )
    assert all(one.seconds > 0 for one in timed), "a step that takes no time"
    return _fit(prefill, decode, _held_out_error(prefill, decode))


def _held_out_error(prefill: list[Timed], decode: list[Timed]) -> float:
    """Works with the smallest and largest batch are always in the fit."""
    held_out = [*prefill[3::_HELD_OUT_EVERY], *decode[3:-1:_HELD_OUT_EVERY]]
    rest = [[one for one in side if one not in held_out] for side in (prefill, decode)]
    times = _fit(rest[0], rest[1], 0.0)
    return median(relative_errors(times, held_out)) if held_out else 0.0


def relative_errors(times: LinearTimes, timed: Sequence[Timed]) -> list[float]:
    return [abs(times.step_s(one.work) / one.seconds - 1) for one in timed]


def _fit(prefill: list[Timed], decode: list[Timed], error: float) -> LinearTimes:
    overhead, token, pair, sequence = _solve([_prefill_row(one.work) for one in prefill], prefill)
    knots, kv_token = _decode(decode)
    return LinearTimes(
        prefill_overhead_s=overhead,
        prefill_token_s=token,
        prefill_pair_s=pair,
        prefill_sequence_s=sequence,
        decode_knots=knots,
        decode_kv_token_s=kv_token,
        error=error,
    )


def _solve(rows: list[list[float]], timed: list[Timed]) -> list[float]:
    if not timed:
        return [0.0] * 4
    seconds: _Floats = np.array([one.seconds for one in timed])
    found: list[float] = relative_least_squares(np.array(rows, dtype=float), seconds).tolist()
    return found


def _prefill_row(work: StepWork) -> list[float]:
    return [1.0, work.prefill_tokens, work.attended_tokens, work.prefill_sequences]


def _decode(timed: list[Timed]) -> tuple[tuple[tuple[int, float], ...], float]:
    """Knots at the timed batch sizes, which never fall, and the time of a token of context."""
    counts = sorted({one.work.decode_sequences for one in timed})
    if not counts:
        return (), 0.0
    *rises, kv_token = _solve([_decode_row(one.work, counts) for one in timed], timed)
    heights: list[float] = np.cumsum(rises).tolist()
    return tuple(zip(counts, heights, strict=True)), kv_token


def _decode_row(work: StepWork, counts: list[int]) -> list[float]:
    return [*(float(work.decode_sequences >= count) for count in counts), float(work.kv_tokens)]


_SHORT_TOKENS = 32
_LONG_TOKENS = 512
"""Contexts of decode steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A step of `rows` sequences, each with `tokens` new ones after `context` others."""

    rows: int
    tokens: int
    context: int = 0

    @property
    def work(self) -> StepWork:
        if self.tokens == 1:
            return decode_work(self.rows, self.rows * self.context)
        return sum([prefill_work(self.tokens, self.context)] * self.rows, StepWork())


def design(
    *, chunk_tokens: int, most_sequences: int, max_model_len: int, pool_tokens: int
) -> list[tuple[Shape, bool]]:
    """Each shape once, with a flag: it is essential for the fit."""
    longest = min(max_model_len, pool_tokens)
    chunk = min(chunk_tokens, longest)
    essential = [*_chunks(chunk, longest), *_ends(most_sequences, longest)]
    more = [*_packed(chunk, longest), *_batches(most_sequences, longest, pool_tokens)]
    return [(shape, shape in essential) for shape in dict.fromkeys([*essential, *more])]


def _chunks(chunk: int, longest: int) -> list[Shape]:
    """A prompt's first chunk, and a small chunk far behind others."""
    small = max(2, chunk // 8)
    first = [Shape(rows=1, tokens=max(2, chunk)), Shape(rows=1, tokens=small)]
    return [*first, *_behind(small, longest // 2)]


def _behind(tokens: int, context: int) -> list[Shape]:
    return [Shape(rows=1, tokens=tokens, context=context)] if context >= tokens else []


def _ends(most: int, longest: int) -> list[Shape]:
    short = min(_SHORT_TOKENS, longest - 1)
    return [Shape(rows=rows, tokens=1, context=short) for rows in (1, most)]


def _packed(chunk: int, longest: int) -> list[Shape]:
    """Several prompts in a step, and chunks of other sizes with and without earlier tokens."""
    shapes = [Shape(rows=4, tokens=tokens) for tokens in {chunk // 4, chunk // 16} if tokens > 1]
    shapes += [Shape(rows=1, tokens=tokens) for tokens in {chunk // 2, chunk // 32} if tokens > 1]
    for tokens, context in ((chunk, chunk), (chunk // 4, chunk)):
        if 1 < tokens <= longest - context:
            shapes.append(Shape(rows=1, tokens=tokens, context=context))
    return shapes


def _batches(most: int, longest: int, pool_tokens: int) -> list[Shape]:
    """Powers of two, with short and with long contexts."""
    rows = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [
        Shape(rows=n, tokens=1, context=min(context, longest - 1, max(1, pool_tokens // n - 1)))
        for n in [*rows, most]
        for context in (_SHORT_TOKENS, _LONG_TOKENS)
    ]
