"""Tables of the points, of predictions against what happened, and a scatter plot."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.live.points import Point, quantile
from bench.live.told import Predicted

_WIDTH = 170
_POINTS = (
    *(
        "policy",
        "rate",
        "/s",
        "offered",
        "admitted",
        "kept",
        "broken of offered",
        "goodput/s",
        "TTFT p50",
        "p99",
    ),
    *("TPOT p50", "p99", "refusal p99", "why"),
)
Pairs = list[tuple[float, float]]
"""(predicted, actual) seconds"""


def show_points(points: Sequence[Point]) -> None:
    table = Table(title="Overload: latencies in ms", title_justify="left")
    for heading in _POINTS:
        table.add_column(heading, overflow="fold")
    for one in points:
        table.add_row(*_cells(one))
    _console().print(table)


def _cells(one: Point) -> list[str]:
    ends = ", ladder" if one.ladder else ""
    ends += f", {one.routers} routers" if one.routers > 1 else ""
    return [
        f"{one.kind}{ends}",
        f"{one.factor:g} x",
        f"{one.rate_per_s:.1f}",
        str(one.offered),
        str(one.admitted),
        f"{100 * one.attainment:.1f} %",
        f"{100 * one.broken:.1f} %",
        f"{one.goodput_per_s:.2f}",
        *map(_ms, (one.ttft_p50_s, one.ttft_p99_s, one.tpot_p50_s, one.tpot_p99_s)),
        "" if one.refusal_p99_s is None else f"<= {_ms(one.refusal_p99_s)}",
        ", ".join(f"{count} {reason}" for reason, count in one.refused.items()),
    ]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.3g}"


def _ratio(value: float | None, against: float | None) -> str:
    return "" if value is None or not against else f"{value / against:.2f}"


# --- predictions --------------------------------------------------------------------------------


def pairs(predictions: Sequence[Predicted]) -> dict[str, Pairs]:
    """# TTFT, TPOT |-> of those that got so far"""
    ttft = [(p.ttft_s, p.actual_ttft_s) for p in predictions if p.actual_ttft_s is not None]
    tpot = [(p.tpot_s, p.actual_tpot_s) for p in predictions if p.actual_tpot_s is not None]
    return {"TTFT": ttft, "TPOT": tpot}


def show_scatter(policy: str, predictions: Sequence[Predicted]) -> None:
    """Actual by predicted, in bands of the prediction."""
    table = Table(title=f"Predicted against actual, {policy}: ms", title_justify="left")
    for heading in ("", "predicted", "requests", "actual p10", "p50", "p90", "p99", "p50 ratio"):
        table.add_column(heading)
    for kind, points in pairs(predictions).items():
        for band in _bands(sorted(points)):
            actual = [one for _, one in band]
            shown = [_ms(quantile(actual, q)) for q in (0.1, 0.5, 0.9, 0.99)]
            ratio = quantile((a / p for p, a in band if p), 0.5)
            low, high = _ms(band[0][0]), _ms(band[-1][0])
            row = (kind, f"{low} to {high}", str(len(band)), *shown, f"{ratio or 0:.2f}")
            table.add_row(*row)
    _console().print(table)


def _bands(ascending: Pairs, count: int = 5) -> list[Pairs]:
    size = -(-len(ascending) // count)
    return [ascending[i : i + size] for i in range(0, len(ascending), size or 1)]


def draw_scatter(path: Path, by_policy: Mapping[str, Sequence[Predicted]]) -> None:
    """A PNG file; needs matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 5))
    for axis, kind in zip(axes, ("TTFT", "TPOT"), strict=True):
        most = 0.0
        for policy, predictions in by_policy.items():
            points = pairs(predictions)[kind]
            predicted, actual = [p for p, _ in points], [a for _, a in points]
            axis.scatter(predicted, actual, s=6, alpha=0.5, label=policy)
            most = max([most, *predicted, *actual])
        axis.plot([0, most], [0, most], color="grey", linewidth=1)
        axis.set_xlabel(f"predicted {kind} (s)")
        axis.set_ylabel("actual (s)")
        axis.legend()
    figure.savefig(path)
    plt.close(figure)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _WIDTH)
