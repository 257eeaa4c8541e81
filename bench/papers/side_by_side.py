"""Paper and ours in one table."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

_FILE_COLUMNS = 140


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One published number (None: the paper gives none) and ours. `digits` after the point."""

    what: str
    unit: str
    paper: float | None
    ours: float
    source: str
    digits: int = 3

    @property
    def off(self) -> str:
        """How far ours is from the paper's, or that all printed digits agree."""
        if self.paper is None or self.off_percent is None:
            return ""
        if f"{self.paper:.{self.digits}f}" == f"{self.ours:.{self.digits}f}":
            return "every digit"
        return f"{self.off_percent:+.2g} %"

    @property
    def off_percent(self) -> float | None:
        return 100 * (self.ours / self.paper - 1) if self.paper else None


def print_claims(title: str, claims: Sequence[Claim], notes: Sequence[str] = ()) -> None:
    table = Table(title=title, title_justify="left")
    for heading in ("what", "unit", "paper", "ours", "off", "source"):
        table.add_column(heading, justify="left" if heading in ("what", "source") else "right")
    for claim in claims:
        paper = "" if claim.paper is None else f"{claim.paper:.{claim.digits}f}"
        ours = f"{claim.ours:.{claim.digits}f}"
        table.add_row(claim.what, claim.unit, paper, ours, claim.off, claim.source)
    console = Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS, highlight=False)
    console.print(table)
    for note in notes:
        console.print(note, markup=False)


def write_claims(path: Path, claims: Sequence[Claim]) -> None:
    rows = [{**asdict(claim), "off_percent": claim.off_percent} for claim in claims]
    path.write_text(json.dumps(rows, indent=2) + "\n")
