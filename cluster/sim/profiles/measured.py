"""Step times from a measured table, as splitwise-sim reads its own (ISCA'24, performance_model.py).

Prefill and decode are lines through the medians over a batch's tokens: in the table prompt_size x
batch_size, in a step the prompts' tokens and one for each sequence that decodes. The tables say
nothing of context lengths, so decode does not depend on them.

Reads the rows of a measured table that a profile picks.

Lines between measured points. Pure.

Step times from end-to-end measurements at fixed concurrency (aiconfigurator's silicon rows).

A row's TPOT is taken as the step of so many sequences at half their output, and mixes in the
prefills that interrupt it. Its TTFT mixes in waiting, so prefill comes from the rows of the
lowest concurrency alone, where it waits least.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median

from cluster.sim.profiles.schema import SiliconProfile, TableProfile
from engine.core.step_times import NotCovered, StepWork
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Ascending measured values of what `name` says; `source` is for messages."""

    values: tuple[float, ...]
    name: str
    source: str
    extrapolate: bool = False

    def line(self, x: float) -> tuple[int, int, float]:
        """The two points whose line `x` is on, and where between them it is, in [0, 1] unless
        beyond. Raises NotCovered beyond the values, but where extrapolation was asked for."""
        first, last = self.values[0], self.values[-1]
        if not self.extrapolate and not first <= x <= last:
            raise NotCovered(
                f"{self.source}: {x:g} {self.name} asked, measured are {first:g} to {last:g}; "
                "set extrapolate: true in the profile to go beyond"
            )
        if x in (first, last) or first == last:
            end = 0 if x == first or first == last else len(self.values) - 1
            return end, end, 0.0
        high = min(max(bisect_left(self.values, x), 1), len(self.values) - 1)
        span = self.values[high] - self.values[high - 1]
        return high - 1, high, (x - self.values[high - 1]) / span


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Straight lines between measured points; see `Axis.line` for what is beyond them."""

    axis: Axis
    ys: tuple[float, ...]

    def at(self, x: float) -> float:
        low, high, share = self.axis.line(x)
        return self.ys[low] + (self.ys[high] - self.ys[low]) * share


def curve_of_medians(
    points: Iterable[tuple[float, float]], *, x_name: str, source: str, extrapolate: bool
) -> Curve:
    """Repeated measurements at one x count by their median. At least one point is needed."""
    groups = groupby(sorted(points), key=lambda point: point[0])
    medians = [(x, median(y for _, y in group)) for x, group in groups]
    xs = tuple(x for x, _ in medians)
    axis = Axis(values=xs, name=x_name, source=source, extrapolate=extrapolate)
    return Curve(axis=axis, ys=tuple(y for _, y in medians))


_MS_PER_S = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTimes:
    """A step with both kinds of work takes `mixed_factor` x a prefill of all its tokens."""

    prefill_s: Curve
    decode_s: Curve
    mixed_factor: float

    def step_s(self, work: StepWork) -> float:
        if not work.prefill_tokens:
            return self.decode_s.at(work.decode_sequences)
        factor = self.mixed_factor if work.decode_sequences else 1.0
        return factor * self.prefill_s.at(work.prefill_tokens + work.decode_sequences)


def table_times(profile: TableProfile, folder: Path) -> TableTimes:
    """Raises ConfigError where the file lacks columns or rows."""
    path = folder / profile.file
    needed = ("prompt_size", "batch_size", "prompt_time", "token_time")
    rows = read_rows(path, profile.where, needed)

    def curve(column: str) -> Curve:
        points = (
            (
                number(row, "prompt_size", path) * number(row, "batch_size", path),
                number(row, column, path) / _MS_PER_S,
            )
            for row in rows
        )
        return curve_of_medians(
            points,
            x_name="tokens in a batch",
            source=f"{profile.name}: {column}",
            extrapolate=profile.extrapolate,
        )

    return TableTimes(
        prefill_s=curve("prompt_time"),
        decode_s=curve("token_time"),
        mixed_factor=profile.mixed_factor,
    )


_NEEDED = ("isl", "osl", "batch_size", "silicon_ttft_ms", "silicon_tpot_ms", "mode")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiliconTimes:
    """Decode is known along the sequences, at each of a few mean contexts (tokens a sequence)."""

    prefill_s: Curve
    contexts: Axis
    decode_s: tuple[Curve, ...]  # one for each context

    def step_s(self, work: StepWork) -> float:
        """A step that mixes both kinds takes their sum."""
        prefill_s = self.prefill_s.at(work.prefill_tokens) if work.prefill_tokens else 0.0
        return prefill_s + (self._decode_s(work) if work.decode_sequences else 0.0)

    def _decode_s(self, work: StepWork) -> float:
        low, high, share = self.contexts.line(work.kv_tokens / work.decode_sequences)
        shorter_s = self.decode_s[low].at(work.decode_sequences)
        longer_s = self.decode_s[high].at(work.decode_sequences)
        return shorter_s + (longer_s - shorter_s) * share


def silicon_times(profile: SiliconProfile, folder: Path) -> SiliconTimes:
    """Raises ConfigError where the file lacks columns or rows. Only rows of `mode` agg are used."""
    path = folder / profile.file
    rows = read_rows(path, {**profile.where, "mode": "agg"}, _NEEDED)
    by_context: dict[float, list[Row]] = defaultdict(list)
    for row in rows:
        by_context[mean_context(row, path)].append(row)
    contexts = Axis(
        values=tuple(sorted(by_context)),
        name="tokens of context in a sequence",
        source=profile.name,
        extrapolate=profile.extrapolate,
    )
    return SiliconTimes(
        prefill_s=_prefill(profile, rows, path),
        contexts=contexts,
        decode_s=tuple(_decode(profile, by_context[c], path) for c in contexts.values),
    )


def mean_context(row: Row, path: Path) -> float:
    return number(row, "isl", path) + number(row, "osl", path) / 2


def _prefill(profile: SiliconProfile, rows: list[Row], path: Path) -> Curve:
    quietest: dict[float, float] = {}
    for row in rows:
        tokens, sequences = number(row, "isl", path), number(row, "batch_size", path)
        quietest[tokens] = min(sequences, quietest.get(tokens, sequences))
    points = (
        (number(row, "isl", path), number(row, "silicon_ttft_ms", path) / _MS_PER_S)
        for row in rows
        if number(row, "batch_size", path) == quietest[number(row, "isl", path)]
    )
    return curve_of_medians(
        points,
        x_name="prompt tokens",
        source=f"{profile.name}: silicon_ttft_ms",
        extrapolate=profile.extrapolate,
    )


def _decode(profile: SiliconProfile, rows: list[Row], path: Path) -> Curve:
    points = (
        (number(row, "batch_size", path), number(row, "silicon_tpot_ms", path) / _MS_PER_S)
        for row in rows
    )
    return curve_of_medians(
        points,
        x_name="sequences",
        source=f"{profile.name}: silicon_tpot_ms",
        extrapolate=profile.extrapolate,
    )
