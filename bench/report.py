"""What every benchmark prints: rows with their peer or limit beside them, as table and as JSON."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement. `ratio` is value / against_value; `goal` is what the ratio should reach
    (at least, or with `lower_is_better` at most). None: not measured, or no goal."""

    name: str
    value: float
    unit: str
    against: str = ""
    against_value: float | None = None
    goal: float | None = None
    lower_is_better: bool = False
    method: str = ""
    spread: str = ""

    @property
    def ratio(self) -> float | None:
        return self.value / self.against_value if self.against_value else None

    @property
    def reached(self) -> bool | None:
        if self.ratio is None or self.goal is None:
            return None
        return self.ratio <= self.goal if self.lower_is_better else self.ratio >= self.goal

    def as_json(self) -> dict[str, object]:
        fields = asdict(self)
        del fields["lower_is_better"]
        fields["method"] = "; ".join(filter(None, (self.method, fields.pop("spread"))))
        return {**fields, "ratio": self.ratio, "reached": self.reached}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Repeated measurements of one thing, in their order."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def spread(self) -> str:
        low, high = min(self.values), max(self.values)
        return f"median of {len(self.values)}, {low:.4g} to {high:.4g}"


def interleave(
    candidates: Mapping[str, Callable[[], float]], *, repeats: int
) -> dict[str, Reading]:
    """Measure all candidates in turn, `repeats` times, so that drift hits them alike."""
    values: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, measure in candidates.items():
            values[name].append(measure())
    return {name: Reading(values=tuple(found)) for name, found in values.items()}


_FILE_COLUMNS = 180
_HEADINGS = "what", "value", "against", "its value", "ratio", "goal", "reached", "spread", "note"


def print_table(title: str, rows: Sequence[Row]) -> None:
    """A line per row; how each was measured stands below, once for all rows that share it."""
    methods = list(dict.fromkeys(row.method for row in rows if row.method))
    table = Table(title=title, title_justify="left")
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold")
    for row in rows:
        note = str(methods.index(row.method) + 1) if row.method else ""
        table.add_row(*_cells(row), note)
    console = Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS)
    console.print(table)
    for number, method in enumerate(methods, 1):
        console.print(f"{number}  {method}", highlight=False)


def _cells(row: Row) -> list[str]:
    peer = "not measured" if row.against and row.against_value is None else ""
    if row.against_value is not None:
        peer = f"{row.against_value:.4g} {row.unit}"
    goal = "" if row.goal is None else f"{'<=' if row.lower_is_better else '>='} {row.goal:g}"
    ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
    reached = {None: "", True: "yes", False: "no"}[row.reached]
    value = f"{row.value:.4g} {row.unit}"
    return [row.name, value, row.against, peer, ratio, goal, reached, row.spread]


def write_json(path: Path, rows: Sequence[Row]) -> None:
    path.write_text(json.dumps([row.as_json() for row in rows], indent=2) + "\n")
