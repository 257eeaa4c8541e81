"""Figures as they are kept in docs/figures.json, and the README's table of them. Pure but for the
two functions that read and write the file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

BEGIN, END = "<!-- figures: begin, written by make figures -->", "<!-- figures: end -->"
HEAD = ("what", "kvrelay", "against", "ratio", "command", "commit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One row of the table. `commit` is that of the code which was measured; `earlier` says that
    only the commit is known at which the figure was written down, so the code is that or an
    earlier one. Without a commit the row has not been measured yet."""

    key: str
    what: str
    ours: str = ""
    against: str = ""
    ratio: str = ""
    command: str
    commit: str = ""
    earlier: bool = False

    @property
    def cells(self) -> tuple[str, ...]:
        command = f"`{self.command}`"
        if not self.commit:
            return (self.what, "not measured yet", self.against, "", command, "")
        commit = f"{self.commit} or earlier" if self.earlier else self.commit
        return (self.what, self.ours, self.against, self.ratio, command, commit)


def table(rows: Iterable[Recorded]) -> str:
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    return "\n".join([*lines, *(_line(row.cells) for row in rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def with_table(page: str, rows: Iterable[Recorded]) -> str:
    """The page, with the table between the markers renewed. Raises ValueError without markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table(rows)}\n{END}{after}"


def read(path: Path) -> list[Recorded]:
    return [Recorded(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def write(path: Path, rows: Iterable[Recorded]) -> None:
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
