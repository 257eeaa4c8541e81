"""How well a roofline predicts real servers: fitted on half of the measurements, held against the
other half.

    python -m bench.papers.silicon silicon/h200_measured.csv

Data: end-to-end measurements on H200 from ai-dynamo/aiconfigurator (Apache-2.0). Beside it: the
median error that BLIS (llm-d) publishes for its simulator over 36 runs, 7 to 9 % for inter-token
latency and end-to-end time; and AIConfigurator's leave-one-out medians of single operators, 1 to
5 % (9.7 % beyond the measured range). Neither is of these rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.papers.silicon_fit import START, Fitted, Point, fit, predict
from bench.papers.silicon_rows import Measured, read_measured

PUBLISHED = (
    "published, of other rows: BLIS 7-9 % (median, inter-token latency and end to end), "
    "AIConfigurator 1-5 % (median, single operators)"
)
_FEWEST = 3
"""Rows of a group to fit on: with less, the shares of all models stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one row that was not fitted."""

    group: tuple[str, str, str]
    tpot_error: float
    ttft_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """`everywhere`: the shares of all models; `groups`: those of each model on each server."""

    everywhere: Fitted
    groups: dict[tuple[str, str, str], Fitted]
    outcomes: tuple[Outcome, ...]
    common_outcomes: tuple[Outcome, ...]


def hold_out(rows: Sequence[Measured], half: int) -> Fold:
    """Fits on the rows of the other half."""
    seen, unseen = ([r for r in rows if r.half != half], [r for r in rows if r.half == half])
    common = fit(seen, START, pull=0.0)
    points = {group: _fit_group(group, seen, common) for group in sorted({r.group for r in rows})}
    fitted = {group: Fitted.at(point) for group, point in points.items()}
    everywhere = Fitted.at(common)
    return Fold(
        everywhere=everywhere,
        groups=fitted,
        outcomes=tuple(_outcome(row, fitted[row.group]) for row in unseen),
        common_outcomes=tuple(_outcome(row, everywhere) for row in unseen),
    )


def _fit_group(group: tuple[str, str, str], seen: list[Measured], common: Point) -> Point:
    own = [row for row in seen if row.group == group]
    return fit(own, common) if len(own) >= _FEWEST else common


def _outcome(row: Measured, fitted: Fitted) -> Outcome:
    predicted = predict(row, fitted)
    return Outcome(
        group=row.group,
        tpot_error=predicted.tpot_s / row.tpot_s - 1,
        ttft_error=predicted.ttft_s / row.ttft_s - 1,
    )


# --- the report ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Median absolute errors, in percent, over `rows` held out."""

    model: str
    backend: str
    version: str
    rows: int
    tpot_percent: float
    tpot_p90_percent: float
    ttft_percent: float


def lines(outcomes: Sequence[Outcome]) -> list[Line]:
    groups: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.group].append(outcome)
    return [_line(group, groups[group]) for group in sorted(groups)]


def _line(group: tuple[str, str, str], outcomes: Sequence[Outcome]) -> Line:
    tpot = sorted(abs(outcome.tpot_error) for outcome in outcomes)
    return Line(
        model=group[0],
        backend=group[1],
        version=group[2],
        rows=len(outcomes),
        tpot_percent=100 * median(tpot),
        tpot_p90_percent=100 * tpot[ceil(0.9 * (len(tpot) - 1))],
        ttft_percent=100 * median(abs(outcome.ttft_error) for outcome in outcomes),
    )


def overall(name: str, outcomes: Sequence[Outcome]) -> Line:
    return _line((name, "", ""), outcomes)


def print_lines(title: str, found: Sequence[Line]) -> None:
    table = Table(title=title, title_justify="left")
    for heading in ("model", "server", "version", "rows", "TPOT", "TPOT p90", "TTFT"):
        left = heading in ("model", "server", "version")
        table.add_column(heading, justify="left" if left else "right")
    for line in found:
        errors = (line.tpot_percent, line.tpot_p90_percent, line.ttft_percent)
        shown = (f"{error:.1f} %" for error in errors)
        table.add_row(line.model, line.backend, line.version, str(line.rows), *shown)
    Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, help="h200_measured.csv of ai-dynamo/aiconfigurator")
    parser.add_argument("--json", type=Path, help="also write the errors to this file")
    args = parser.parse_args()
    rows, left_out = read_measured(args.rows)
    folds = [hold_out(rows, half) for half in (1, 0)]
    first = lines(folds[0].outcomes)
    print_lines("Held-out half, median absolute error", first)
    totals = [
        overall("all, shares of each model and server", folds[0].outcomes),
        overall("all, halves exchanged", folds[1].outcomes),
        overall("all, one set of shares for everything", folds[0].common_outcomes),
    ]
    print_lines("Together", totals)
    print(PUBLISHED)
    for reason, count in left_out.items():
        print(f"{count} rows left out: {reason}")
    if args.json:
        told = [asdict(line) for line in (*first, *totals)]
        args.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
