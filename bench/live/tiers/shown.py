"""Tables of tiers under load, and what premium's figures are measured against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.table import Table

from bench.live.outcome import Objectives
from bench.live.tiers.load import ALONE, PREMIUM, TIERS
from bench.live.tiers.points import Phase, TierPoint
from bench.report import Row

_WIDTH = 170
_HEADINGS = (
    *("phase", "tier", "offered", "served", "lost", "kept", "goodput/s", "TTFT p50", "p99"),
    *("TPOT p50", "p99", "preemptions", "refused"),
)


def show(phases: Mapping[str, Phase]) -> None:
    table = Table(title="Premium beside free: latencies in ms", title_justify="left")
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold")
    for phase in phases.values():
        for number, one in enumerate(phase.tiers):
            table.add_row(*_cells(phase, one, first=not number))
    Console(width=_WIDTH).print(table)


def _cells(phase: Phase, one: TierPoint, *, first: bool) -> list[str]:
    times = (one.ttft_p50_s, one.ttft_p99_s, one.tpot_p50_s, one.tpot_p99_s)
    return [
        phase.name if first else "",
        one.tier,
        *map(str, (one.offered, one.served, one.lost, one.good)),
        f"{one.good / phase.seconds:.2f}",
        *("" if s is None else f"{1000 * s:.3g}" for s in times),
        str(phase.preemptions) if first else "",
        ", ".join(f"{count} {reason}" for reason, count in one.refused.items()),
    ]


def rows(phases: Mapping[str, Phase], objectives: Objectives, method: str) -> Iterator[Row]:
    """Of premium: only with tiers there are goals."""
    alone = phases.get(ALONE)
    for name, phase in phases.items():
        if name == ALONE:
            continue
        yield from _against_objectives(phase, objectives, method)
        if alone is not None:
            yield from _against_alone(phase, alone.tier(PREMIUM), method)


def _against_objectives(phase: Phase, objectives: Objectives, method: str) -> Iterator[Row]:
    one, goal = phase.tier(PREMIUM), 1.0 if phase.name == TIERS else None
    bounds = (objectives.ttft_s, objectives.tpot_s)
    yield from _p99s(phase, "its objective", bounds, method, goal)
    yield Row(
        name=f"premium's requests that were served, {phase.name}",
        value=one.served,
        unit="",
        against="offered",
        against_value=one.offered,
        goal=goal,
        method=method,
    )


def _against_alone(phase: Phase, alone: TierPoint, method: str) -> Iterator[Row]:
    bounds = (alone.ttft_p99_s or 0.0, alone.tpot_p99_s or 0.0)
    yield from _p99s(phase, "alone", bounds, method)


def _p99s(
    phase: Phase,
    against: str,
    bounds_s: tuple[float, float],
    method: str,
    goal: float | None = None,
) -> Iterator[Row]:
    one = phase.tier(PREMIUM)
    ours_s = (one.ttft_p99_s, one.tpot_p99_s)
    for kind, seconds, bound_s in zip(("TTFT", "TPOT"), ours_s, bounds_s, strict=True):
        yield Row(
            name=f"premium's {kind} p99, {phase.name}",
            value=1000 * (seconds or 0.0),
            unit="ms",
            against=against,
            against_value=1000 * bound_s,
            goal=goal,
            lower_is_better=True,
            method=method,
        )
