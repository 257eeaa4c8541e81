"""One policy on a live cluster, rate after rate, then the same arrivals in the simulator."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.live.calibrate import Calibration
from bench.live.offered import poisson
from bench.live.outcome import Objectives, Outcome
from bench.live.points import Load, Point, Simulated, bucket_quantile, point
from bench.live.replay import EARLY_S, Window, replay, simulated
from bench.live.stack import Policy, load, stack
from bench.live.subject import Subject
from bench.live.told import Predicted, Told, read_record
from bench.serving.plain_cluster import PlainCluster

WARM_FACTOR, WARM_S = 1.0, 20.0
"""Before the first rate, so that the router has learnt how far to trust its predictions."""
REFUSALS = "kvrelay:refusal_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    policy: Policy
    factors: tuple[float, ...]
    seconds: float
    subject: Subject
    seed: int
    patience_s: float
    routers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Predictions of the requests of all rates; none where several routers have decided."""

    points: list[Point]
    predictions: list[Predicted]


def run(plan: Plan, calibration: Calibration, corpus: Sequence[int]) -> Run:
    asked, model = calibration.objectives, plan.subject.folder
    if plan.routers > 1:
        with stack(plan.policy, asked, model=model, routers=plan.routers) as cluster:
            points = [one for one, _ in _measure(plan, calibration, corpus, cluster)]
            return Run(points=points, predictions=[])
    with tempfile.TemporaryDirectory() as name:
        record = Path(name) / "record.jsonl"
        with stack(plan.policy, asked, record, model=model) as cluster:
            measured = list(_measure(plan, calibration, corpus, cluster))
        told = read_record(record)
        points = [one for one, _ in measured]
        if not plan.subject.mix.own_ends:
            points = _beside(plan, calibration, told, record, measured)
    began_s = measured[0][1][0].sent_s - EARLY_S
    asked_for = [one for one in told.predictions() if one.at_s > began_s]
    return Run(points=points, predictions=asked_for)


def _measure(
    plan: Plan, calibration: Calibration, corpus: Sequence[int], cluster: PlainCluster
) -> Iterator[tuple[Point, list[Outcome]]]:
    """Warm-up first, of which nothing is told."""
    for number, factor in enumerate((WARM_FACTOR, *plan.factors)):
        seconds = plan.seconds if number else WARM_S
        rate = factor * calibration.capacity_per_s
        seed = 1000 * plan.seed + number
        offered = poisson(plan.subject.mix, corpus, rate_per_s=rate, seconds=seconds, seed=seed)
        before = cluster.histogram(REFUSALS)
        outcomes = load(cluster, offered, patience_s=plan.patience_s)
        p99_s = bucket_quantile(before, cluster.histogram(REFUSALS), 0.99)
        it = Load(
            policy=plan.policy.admission,
            ladder=plan.policy.ladder,
            own_ends=plan.subject.mix.own_ends,
            routers=plan.routers,
            factor=factor,
            rate_per_s=rate,
            seconds=seconds,
        )
        if number:
            yield point(it, outcomes, calibration.objectives, p99_s), outcomes


def _beside(
    plan: Plan,
    calibration: Calibration,
    told: Told,
    record: Path,
    measured: Sequence[tuple[Point, list[Outcome]]],
) -> list[Point]:
    """Lengths of refused requests are known only where each is as long as it may be."""
    return [
        replace(one, simulated=_simulated(plan, calibration.objectives, told, record, one, live))
        for one, live in measured
    ]


def _simulated(
    plan: Plan,
    objectives: Objectives,
    told: Told,
    record: Path,
    one: Point,
    live: Sequence[Outcome],
) -> Simulated:
    sent_s = [outcome.sent_s for outcome in live]
    window = Window(first_s=min(sent_s), last_s=max(sent_s), seconds=one.seconds)
    outcomes = replay(record, told, plan.policy, objectives, window, plan.subject.kv())
    return simulated(outcomes, window, objectives)
