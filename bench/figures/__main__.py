"""Measures the README's figures and renews its table: `make figures`.

Each bench runs once, with --json; a row that it yields is kept in docs/figures.json with the
command and the commit. What can't be measured here (a peer that isn't installed) is said, and its
row stays as it is. With --table nothing is measured: the table is written from docs/figures.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.figures.recorded import Recorded, read, with_table, write
from bench.figures.wanted import WANTED, Row, Wanted, figure

REPOSITORY = Path(__file__).parents[2]
FIGURES, README = Path("docs/figures.json"), Path("README.md")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Why a bench yielded no rows, in its own last line."""

    reason: str


def run(command: Sequence[str], folder: Path) -> list[Row] | Failed:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "rows.json"
        done = subprocess.run(
            [*command, "--json", str(path)], cwd=folder, stderr=subprocess.PIPE, text=True
        )
        if done.returncode != 0 or not path.exists():
            said = done.stderr.strip().splitlines()
            return Failed(reason=said[-1] if said else f"exit code {done.returncode}")
        rows: list[Row] = json.loads(path.read_text())
        return rows


def commit_of(folder: Path) -> str:
    """Raises SystemExit where the code is not that of a commit."""
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no").splitlines()
    own = {str(FIGURES), str(README)}
    dirty = [line[3:] for line in changed if line[3:] not in own]
    if dirty:
        sys.exit(f"commit first: a figure needs the commit of its code, but {dirty[0]} is changed")
    return _git(folder, "rev-parse", "--short", "HEAD").strip()


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


def measured(
    wanted: Sequence[Wanted], found: Mapping[str, list[Row] | Failed], commit: str
) -> dict[str, Recorded]:
    """# key |-> its new row; those that were not measured are left out, and said."""
    new: dict[str, Recorded] = {}
    for one in wanted:
        rows = found[one.command]
        read_off = None if isinstance(rows, Failed) else figure(one, rows)
        if read_off is None:
            why = rows.reason if isinstance(rows, Failed) else "the bench yields no such row"
            print(f"{one.key}: not measured: {why}")
            continue
        new[one.key] = Recorded(
            key=one.key,
            what=one.what,
            ours=read_off.ours,
            against=read_off.against,
            ratio=read_off.ratio,
            command=one.command,
            commit=commit,
        )
    return new


def merged(kept: Sequence[Recorded], new: Mapping[str, Recorded]) -> list[Recorded]:
    """In the order of WANTED; what was never measured has a row that says so."""
    old = {row.key: row for row in kept}
    return [
        new.get(one.key)
        or old.get(one.key)
        or Recorded(key=one.key, what=one.what, against=one.peer, command=one.command)
        for one in WANTED
    ]


def measure(keys: Sequence[str], folder: Path) -> dict[str, Recorded]:
    commit = commit_of(folder)
    wanted = [one for one in WANTED if not keys or one.key in keys]
    found: dict[str, list[Row] | Failed] = {}
    for one in wanted:
        if one.command not in found:
            print(f"{one.command} ...", flush=True)
            found[one.command] = run([sys.executable, "-m", one.module, *one.options], folder)
    return measured(wanted, found, commit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    keys = [one.key for one in WANTED]
    parser.add_argument("--only", nargs="+", choices=keys, default=[], help="measure these rows")
    parser.add_argument("--table", action="store_true", help="write the table, measure nothing")
    parser.add_argument("--folder", type=Path, default=REPOSITORY, help="the repository")
    args = parser.parse_args()
    figures, readme = args.folder / FIGURES, args.folder / README
    new = {} if args.table else measure(args.only, args.folder)
    rows = merged(read(figures), new)
    write(figures, rows)
    readme.write_text(with_table(readme.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
