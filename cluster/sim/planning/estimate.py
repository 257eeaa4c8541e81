"""What one copy of a model could serve of a workload, by arithmetic. Pure.

The bound of queueing theory without its queues: a server is busy for its mean service time per
request. Simulation then says what waiting costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from cluster.sim.planning.copies import Copy
from cluster.sim.trace import TraceRequest
from engine.latency import decode_work, prefill_work

_SAMPLES = 64
_MOST_SEQUENCES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """`attainment` is the share of all offered requests that must meet both."""

    ttft_s: float
    tpot_s: float
    attainment: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A trace in a few numbers; `prompts` is a sample of their lengths."""

    rate_per_s: float
    prompts: tuple[int, ...]
    mean_output: float
    longest: int

    @property
    def mean_context(self) -> float:
        return fmean(self.prompts) + self.mean_output / 2


def workload(requests: Sequence[TraceRequest], rate_scale: float) -> Workload:
    every = max(1, len(requests) // _SAMPLES)
    last_s = requests[-1].arrival_s or 1.0
    return Workload(
        rate_per_s=rate_scale * len(requests) / last_s,
        prompts=tuple(one.input_tokens for one in requests[::every]),
        mean_output=fmean(one.output_tokens for one in requests),
        longest=max(one.input_tokens + one.output_tokens for one in requests),
    )


def prefill_s(copy: Copy, work: Workload) -> float:
    """Of a request, in the mean; nothing is found in caches."""
    return fmean(copy.times.step_s(prefill_work(tokens)) for tokens in work.prompts)


def decode_s(copy: Copy, work: Workload, tpot_s: float) -> float | None:
    """Of a request, its share of the largest batch that fits and keeps `tpot_s`. None: even one
    sequence is slower than that."""
    fitting = int(copy.kv_tokens / work.mean_context)
    sequences = _largest_batch(copy, work, tpot_s, min(_MOST_SEQUENCES, fitting))
    if not sequences:
        return None
    return work.mean_output * _step_s(copy, work, sequences) / sequences


def _largest_batch(copy: Copy, work: Workload, tpot_s: float, most: int) -> int:
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if _step_s(copy, work, middle) <= tpot_s:
            low = middle
        else:
            high = middle - 1
    return low


def _step_s(copy: Copy, work: Workload, sequences: int) -> float:
    return copy.times.step_s(decode_work(sequences, int(sequences * work.mean_context)))
