"""What the machine can do: latencies without load, from which objectives are set, and capacity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

from bench.live.offered import Mix, one
from bench.live.outcome import Objectives
from bench.live.stack import Policy, load, stack

ALONE, AT_ONCE, TOGETHER = 16, 16, 96
TTFT_FACTOR, TPOT_FACTOR = 8.0, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """`ttft_s` and `tpot_s`: medians of requests that were alone."""

    ttft_s: float
    tpot_s: float
    capacity_per_s: float

    @property
    def objectives(self) -> Objectives:
        return Objectives(ttft_s=TTFT_FACTOR * self.ttft_s, tpot_s=TPOT_FACTOR * self.tpot_s)


def calibrate(mix: Mix, corpus: Sequence[int]) -> Calibration:
    """Capacity: requests done per second in a closed loop of `AT_ONCE` clients."""
    rng = Random(0)
    with stack(Policy(admission="none"), None) as cluster:
        load(cluster, [one(mix, corpus, rng) for _ in range(4)], at_once=1)
        alone = load(cluster, [one(mix, corpus, rng) for _ in range(ALONE)], at_once=1)
        many = load(cluster, [one(mix, corpus, rng) for _ in range(TOGETHER)], at_once=AT_ONCE)
    ends = sorted(each.sent_s + (each.last_s or 0.0) for each in many)
    inner = ends[AT_ONCE : TOGETHER - AT_ONCE]  # while the loop was full
    return Calibration(
        ttft_s=median(each.first_s or 0.0 for each in alone),
        tpot_s=median(each.tpot_s or 0.0 for each in alone),
        capacity_per_s=(len(inner) - 1) / (inner[-1] - inner[0]),
    )
