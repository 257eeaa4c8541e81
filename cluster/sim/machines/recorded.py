"""Steps that live workers have recorded: by how much each differed from what was predicted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cluster.sim.machines.noise import StepKind
from kvrelay.errors import ConfigError

KINDS: tuple[StepKind, ...] = ("prefill", "decode")
KEY = "simulation.noise.recorded"


def read_recorded(folder: Path) -> dict[StepKind, tuple[float, ...]]:
    """Actual by predicted seconds of each step, by kind, from all traces in a folder, one worker
    after another. Raises ConfigError."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ConfigError(f"{KEY}: {folder}: no traces in it; observability.trace_dir writes them")
    found: dict[StepKind, list[float]] = {kind: [] for kind in KINDS}
    for path in paths:
        try:
            with path.open(encoding="utf-8") as lines:
                for kind, ratio in ratios(lines):
                    found[kind].append(ratio)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{KEY}: {path}: not a worker's trace: {error}") from None
    if not any(found.values()):
        raise ConfigError(f"{KEY}: {folder}: its traces have no steps")
    return {kind: tuple(each) for kind, each in found.items()}


def ratios(lines: Iterable[str]) -> Iterator[tuple[StepKind, float]]:
    """Steps that ran in a row have one ratio each: that of all."""
    for event in trace_events(lines):
        if event["name"] == "stepped":
            facts = event["args"]
            ratio = 1e3 * event["dur"] / facts["predicted_ns"]
            for _ in range(facts["steps"]):
                yield facts["kind"], ratio


def trace_events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Of a Chrome trace with one event to a line, whose end may be missing."""
    for line in lines:
        text = line.strip().removeprefix("[").rstrip("],")
        if text:
            yield json.loads(text if text.endswith("}") else text + "}")
