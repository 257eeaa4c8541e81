"""Reads the rows of a measured table that a profile picks."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvrelay.errors import ConfigError

Row = Mapping[str, str]


def read_rows(path: Path, where: Mapping[str, str], needed: Iterable[str]) -> list[Row]:
    """Those whose columns equal `where`. Raises ConfigError: the file, and what is wrong."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows: list[Row] = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: can't read it: {error}") from None
    columns = set(rows[0]) if rows else set()
    absent = sorted({*where, *needed} - columns)
    if absent:
        raise ConfigError(f"{path}: has no column {', '.join(absent)}")
    found = [row for row in rows if all(row[key] == value for key, value in where.items())]
    if not found:
        wanted = ", ".join(f"{key}={value}" for key, value in where.items())
        raise ConfigError(f"{path}: no row has {wanted}")
    return found


def number(row: Row, column: str, path: Path) -> float:
    """Raises ConfigError, with the row, for anything but a number above zero."""
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{path}: {column} is {row[column]!r}, expected a number above zero")
    return value
