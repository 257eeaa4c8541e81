"""Step times from a measured table, as splitwise-sim reads its own (ISCA'24, performance_model.py).

Prefill and decode are lines through the medians over a batch's tokens: in the table prompt_size x
batch_size, in a step the prompts' tokens and one for each sequence that decodes. The tables say
nothing of context lengths, so decode does not depend on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.sim.profiles.interpolate import Curve, curve_of_medians
from cluster.sim.profiles.rows import number, read_rows
from cluster.sim.profiles.schema import TableProfile
from engine.latency import StepWork

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
