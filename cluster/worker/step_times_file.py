"""A YAML file of step times, as `kvrelay status --format json` shows them for each worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from cluster.config.load import describe, read_yaml
from cluster.config.types import Section
from engine.latency_fit import LinearTimes
from kvrelay.errors import ConfigError

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class StepTimesFile(Section):
    """The fields of StepCoefficients."""

    prefill_overhead_s: Seconds
    prefill_token_s: Seconds
    prefill_pair_s: Seconds
    prefill_sequence_s: Seconds = 0.0
    decode_knots: Annotated[
        tuple[tuple[Annotated[int, Field(ge=1)], Annotated[Seconds, Field(gt=0)]], ...],
        Field(min_length=1),
    ]
    decode_kv_token_s: Seconds
    error: Seconds = 0.0


def read_step_times(path: Path, *, most_sequences: int) -> LinearTimes:
    """Raises ConfigError, naming the file and the key, for what can't be used or says nothing of
    batches of `most_sequences`."""
    raw = read_yaml(path)
    try:
        read = StepTimesFile.model_validate_json(json.dumps(raw, default=str))
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe(error, StepTimesFile)}") from None
    most = read.decode_knots[-1][0]
    if most < most_sequences:
        raise ConfigError(
            f"{path}: decode_knots: up to {most} sequences, expected at least "
            f"scheduler.max_running_requests ({most_sequences})"
        )
    try:
        return LinearTimes(**dict(read))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
