"""Finds the coefficients of step times from timed steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from engine.latency import StepWork
from engine.latency_fit import LinearTimes
from engine.least_squares import Floats, relative_least_squares

_HELD_OUT_EVERY = 4


@dataclass(frozen=True, slots=True)
class Timed:
    """A step of prompts or one of decodes, and what it took."""

    work: StepWork
    seconds: float


def fit_times(timed: Sequence[Timed]) -> LinearTimes:
    """Each work once. The error is that of a fit without every fourth one, in these."""
    prefill = [one for one in timed if one.work.prefill_tokens]
    decode = sorted(
        (one for one in timed if not one.work.prefill_tokens),
        key=lambda one: one.work.decode_sequences,
    )
    assert all(one.seconds > 0 for one in timed), "a step that takes no time"
    return _fit(prefill, decode, _held_out_error(prefill, decode))


def _held_out_error(prefill: list[Timed], decode: list[Timed]) -> float:
    """The sequences of the smallest and the largest batch are always fitted."""
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
    seconds: Floats = np.array([one.seconds for one in timed])
    found: list[float] = relative_least_squares(np.array(rows, dtype=float), seconds).tolist()
    return found


def _prefill_row(work: StepWork) -> list[float]:
    return [1.0, work.prefill_tokens, work.attended_tokens, work.prefill_sequences]


def _decode(timed: list[Timed]) -> tuple[tuple[tuple[int, float], ...], float]:
    """Knots where batches were timed, that never fall, and a token of context's time."""
    counts = sorted({one.work.decode_sequences for one in timed})
    if not counts:
        return (), 0.0
    *rises, kv_token = _solve([_decode_row(one.work, counts) for one in timed], timed)
    heights: list[float] = np.cumsum(rises).tolist()
    return tuple(zip(counts, heights, strict=True)), kv_token


def _decode_row(work: StepWork, counts: list[int]) -> list[float]:
    return [*(float(work.decode_sequences >= count) for count in counts), float(work.kv_tokens)]
