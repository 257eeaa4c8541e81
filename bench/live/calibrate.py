"""What the machine can do: latencies without load, from which objectives are set, and capacity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

from bench.live.offered import one
from bench.live.outcome import Objectives, Outcome
from bench.live.stack import Policy, load, stack
from bench.live.subject import Subject

ALONE, AT_ONCE, TURNS = 16, 16, 6
TTFT_FACTOR, TPOT_FACTOR = 8.0, 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """`ttft_s` and `tpot_s`: medians of requests that were alone."""

    ttft_s: float
    tpot_s: float
    capacity_per_s: float

    @property
    def objectives(self) -> Objectives:
        return Objectives(ttft_s=TTFT_FACTOR * self.ttft_s, tpot_s=TPOT_FACTOR * self.tpot_s)


def _check(outcomes: Sequence[Outcome]) -> None:
    """Raises RuntimeError where a request was not served: its latency would count as none."""
    lost = [one for one in outcomes if one.ended != "done"]
    if lost:
        raise RuntimeError(f"{len(lost)} requests {lost[0].ended} without load: {lost[0].reason}")


def calibrate(subject: Subject, corpus: Sequence[int], at_once: int = AT_ONCE) -> Calibration:
    """Capacity: requests done per second in a closed loop of so many clients."""
    rng, mix = Random(0), subject.mix
    with stack(Policy(admission="none"), None, model=subject.folder) as cluster:
        load(cluster, [one(mix, corpus, rng) for _ in range(4)], at_once=1)
        alone = load(cluster, [one(mix, corpus, rng) for _ in range(ALONE)], at_once=1)
        offered = [one(mix, corpus, rng) for _ in range(TURNS * at_once)]
        many = load(cluster, offered, at_once=at_once)
    _check([*alone, *many])
    ends = sorted(each.sent_s + (each.last_s or 0.0) for each in many)
    inner = ends[at_once:-at_once]  # while the loop was full
    return Calibration(
        ttft_s=median(each.first_s or 0.0 for each in alone),
        tpot_s=median(each.tpot_s or 0.0 for each in alone),
        capacity_per_s=(len(inner) - 1) / (inner[-1] - inner[0]),
    )
