"""Step times from end-to-end measurements at fixed concurrency (aiconfigurator's silicon rows).

A row's TPOT is taken as the step of so many sequences at half their output, and mixes in the
prefills that interrupt it. Its TTFT mixes in waiting, so prefill comes from the rows of the
lowest concurrency alone, where it waits least.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from cluster.sim.profiles.interpolate import Axis, Curve, curve_of_medians
from cluster.sim.profiles.rows import Row, number, read_rows
from cluster.sim.profiles.schema import SiliconProfile
from engine.latency import StepWork

_MS_PER_S = 1000.0
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
