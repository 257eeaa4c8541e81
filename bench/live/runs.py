"""One policy on a live cluster, rate after rate; perhaps the same arrivals in the simulator."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.live.calibrate import Calibration
from bench.live.offered import Mix, poisson
from bench.live.outcome import Objectives, Outcome
from bench.live.points import Load, Point, bucket_quantile, point
from bench.live.simulated.measured import Stretch, measure, watched
from bench.live.simulated.replay import (
    EARLY_S,
    Replay,
    Replayed,
    Window,
    median_phases,
    phases,
    replay,
    simulated,
)
from bench.live.stack import Policy, load, stack
from bench.live.subject import Subject
from bench.live.told import Predicted, read_record
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
    simulates: bool = False
    """With what is measured at the first of the rates; workers write traces then."""
    mixes: tuple[Mix, ...] = ()
    """One for each rate; none: the subject's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """# phase of the ledger |-> its median in seconds, live and simulated"""

    factor: float
    live: dict[str, float]
    simulated: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Predictions of the requests of all rates; none where several routers have decided. `phases`:
    of each rate that was simulated."""

    points: list[Point]
    predictions: list[Predicted]
    phases: list[Phases] = field(default_factory=list)


def run(plan: Plan, calibration: Calibration, corpus: Sequence[int]) -> Run:
    asked, model = calibration.objectives, plan.subject.folder
    if plan.routers > 1:
        with stack(plan.policy, asked, model=model, routers=plan.routers) as cluster:
            points = [one for one, _ in _measure(plan, calibration, corpus, cluster)]
            return Run(points=points, predictions=[])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record, traces = folder / "record.jsonl", folder / "traces"
        given = traces if plan.simulates else None
        with (
            stack(plan.policy, asked, record, model=model, traces=given) as cluster,
            watched(cluster) as router,
        ):
            lived = list(_measure(plan, calibration, corpus, cluster))
        told = read_record(record)
        began_s = lived[0][1][0].sent_s - EARLY_S
        predictions = [one for one in told.predictions() if one.at_s > began_s]
        found = Run(points=[one for one, _ in lived], predictions=predictions)
        if not plan.simulates:
            return found
        stretch = _stretch(lived[0][1])
        measured = measure(told, router, traces, stretch, folder / "stretch")
        again = Replay(
            record=record,
            told=told,
            measured=measured,
            policy=plan.policy,
            objectives=asked,
            kv=plan.subject.kv(),
            own_ends=plan.subject.mix.own_ends,
            seed=plan.seed,
        )
        return _beside(found, [_window(*one) for one in lived], replay(again), asked)


def _beside(
    found: Run, windows: Sequence[Window], replayed: Sequence[Replayed], asked: Objectives
) -> Run:
    """With what became of the same arrivals in the simulator."""
    pairs = [*zip(found.points, windows, strict=True)]
    points = [replace(one, simulated=simulated(replayed, window, asked)) for one, window in pairs]
    compared = [
        Phases(
            factor=one.factor,
            live=median_phases([p.phases_s for p in found.predictions if p.at_s in window]),
            simulated=phases(replayed, window),
        )
        for one, window in pairs
    ]
    return replace(found, points=points, phases=compared)


def _stretch(outcomes: Sequence[Outcome]) -> Stretch:
    sent_s = [one.sent_s for one in outcomes]
    return Stretch(first_s=min(sent_s), last_s=max(sent_s))


def _window(point: Point, outcomes: Sequence[Outcome]) -> Window:
    stretch = _stretch(outcomes)
    return Window(first_s=stretch.first_s, last_s=stretch.last_s, seconds=point.seconds)


def _measure(
    plan: Plan, calibration: Calibration, corpus: Sequence[int], cluster: PlainCluster
) -> Iterator[tuple[Point, list[Outcome]]]:
    """Warm-up first, of which nothing is told."""
    for number, factor in enumerate((WARM_FACTOR, *plan.factors)):
        seconds = plan.seconds if number else WARM_S
        rate = factor * calibration.capacity_per_s
        seed = 1000 * plan.seed + number
        mix = plan.mixes[number - 1] if number and plan.mixes else plan.subject.mix
        offered = poisson(mix, corpus, rate_per_s=rate, seconds=seconds, seed=seed)
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
