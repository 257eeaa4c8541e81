"""The workers' Chrome traces as one, and as ranges to compute with."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.process.trace import DEVICE

Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """What one worker did, in seconds of the clock that the host's processes share. `on_device`: as
    its device tells it."""

    name: str
    start_s: float
    end_s: float
    args: dict[str, Any] = field(default_factory=dict)
    process: int = 0
    on_device: bool = False


def merged(folder: Path) -> list[Event]:
    """All that the workers of one host wrote into `folder`, which they have closed."""
    return [
        event for path in sorted(folder.glob("*.json")) for event in json.loads(path.read_text())
    ]


def write(path: Path, events: Iterable[Event]) -> None:
    """For Perfetto (ui.perfetto.dev) and chrome://tracing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": [*events]}) + "\n")


def ranges(events: Iterable[Event]) -> list[Range]:
    return [
        Range(
            name=event["name"],
            start_s=event["ts"] / 1e6,
            end_s=(event["ts"] + event["dur"]) / 1e6,
            args=event["args"],
            process=event["pid"],
            on_device=event.get("cat") == DEVICE,
        )
        for event in events
        if event["ph"] == "X"
    ]
