"""Fits the shares of the data sheet that servers reach, and predicts closed-loop TTFT and TPOT.

In a closed loop each of c sequences prefills once while the others decode, so of the o steps that
one takes, (c - 1) / o hold another's prefill: TPOT is a decode step at half the output, and that
share of what a prefill adds to a step. TTFT is such a mixed step, what the server adds to every
request, and waiting behind the others' prefills; how many of them coincide is not known, so a
share of c - 1 is fitted too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log
from statistics import fmean

from bench.papers.silicon_rows import SHAPES, Measured
from cluster.sim.profiles.load import known_device, known_shape
from cluster.sim.profiles.roofline import Parallel, RooflineTimes, roofline_times
from cluster.sim.profiles.schema import Efficiency
from engine.core.model_shape import ModelShape
from engine.core.step_times import decode_work, prefill_work

Point = tuple[float, ...]
"""Logarithms of the fitted values, in the order of `Fitted`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """`burst`: the share of the other clients whose prompts are ahead of one's own; `request_s`:
    what a server adds to each TTFT, whatever it computes."""

    memory: float
    compute: float
    overhead_s: float
    per_sequence_s: float
    all_reduce_latency_s: float
    burst: float
    request_s: float

    @property
    def efficiency(self) -> Efficiency:
        return Efficiency(
            memory=self.memory,
            compute=self.compute,
            overhead_s=self.overhead_s,
            per_sequence_s=self.per_sequence_s,
            all_reduce_latency_s=self.all_reduce_latency_s,
        )

    @staticmethod
    def at(point: Point) -> Fitted:
        """Shares end at one."""
        memory, compute, overhead, sequence, reduce_, burst, request = (exp(x) for x in point)
        return Fitted(
            memory=min(1.0, memory),
            compute=min(1.0, compute),
            overhead_s=overhead,
            per_sequence_s=sequence,
            all_reduce_latency_s=reduce_,
            burst=min(1.0, burst),
            request_s=request,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    ttft_s: float
    tpot_s: float


def predict(row: Measured, fitted: Fitted) -> Predicted:
    times = _times(row, fitted.efficiency)
    context = row.prompt_tokens + row.output_tokens // 2
    decode = decode_work(row.concurrency, row.concurrency * context)
    decode_s = times.step_s(decode)
    added_s = times.step_s(decode + prefill_work(row.prompt_tokens)) - decode_s
    others = row.concurrency - 1
    return Predicted(
        tpot_s=decode_s + others / row.output_tokens * added_s,
        ttft_s=fitted.request_s + decode_s + added_s * (1 + fitted.burst * others),
    )


def _times(row: Measured, efficiency: Efficiency) -> RooflineTimes:
    return roofline_times(
        known_device("h200-sxm"),
        shape_of(row.model),
        precision=row.precision,
        parallel=Parallel(tensor=row.tensor_parallel),
        efficiency=efficiency,
    )


@cache
def shape_of(model_path: str) -> ModelShape:
    found = known_shape(SHAPES[model_path])
    assert found is not None
    return found


# --- the fit ------------------------------------------------------------------------------------

START: Point = tuple(log(x) for x in (0.7, 0.5, 2e-3, 2e-5, 1e-5, 0.1, 0.05))
_PULL = 0.005
"""What a factor of e away from the shares of all models costs, in mean relative error."""
_FIRST_STEP, _LAST_STEP = 0.5, 0.01


def fit(rows: Sequence[Measured], start: Point, pull: float = _PULL) -> Point:
    """The least mean |log ratio| of TPOT and TTFT together, not far from `start`."""

    def loss(point: Point) -> float:
        fitted = Fitted.at(point)
        missed = fmean(_missed(row, predict(row, fitted)) for row in rows)
        away = sum((x - x0) ** 2 for x, x0 in zip(point, start, strict=True))
        return missed + pull * away

    return pattern_search(loss, start)


def _missed(row: Measured, predicted: Predicted) -> float:
    ttft, tpot = predicted.ttft_s / row.ttft_s, predicted.tpot_s / row.tpot_s
    return abs(log(tpot)) + abs(log(ttft)) / 4


def pattern_search(loss: Callable[[Point], float], start: Point) -> Point:
    """Hooke and Jeeves (1961), without the jumps: each coordinate a step up or down while that
    helps, then half the step."""
    best, lowest, step = start, loss(start), _FIRST_STEP
    while step > _LAST_STEP:
        before = lowest
        for tried in _moves(start, step):
            moved = tuple(x + dx for x, dx in zip(best, tried, strict=True))
            found = loss(moved)
            if found < lowest:
                best, lowest = moved, found
        if lowest > before - 1e-5:
            step /= 2
    return best


def _moves(point: Point, step: float) -> Iterable[Point]:
    for index in range(len(point)):
        for sign in (step, -step):
            yield tuple(sign if at == index else 0.0 for at in range(len(point)))
