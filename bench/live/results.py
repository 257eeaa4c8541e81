"""A file that invocations add their results to."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.live.calibrate import Calibration
from bench.live.points import Point
from bench.live.told import Predicted


@dataclass(slots=True, kw_only=True)
class Results:
    """`calibrations`: # ends |-> what the machine does with such outputs; `predictions`: # kind of
    points |-> of all their requests"""

    model: str
    calibrations: dict[str, Calibration] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    predictions: dict[str, list[Predicted]] = field(default_factory=dict)

    def add(self, points: list[Point], predictions: list[Predicted]) -> None:
        """Instead of what was there of the same."""
        new = {_key(one) for one in points}
        self.points = [one for one in self.points if _key(one) not in new] + points
        for kind in {one.kind for one in points if predictions}:
            self.predictions[kind] = predictions


def _key(one: Point) -> tuple[str, bool, bool, int, float]:
    return one.policy, one.ladder, one.own_ends, one.routers, one.factor


def read(path: Path, model: str) -> Results:
    """Ends the process where it has results of another."""
    if not path.exists():
        return Results(model=model)
    raw = json.loads(path.read_text())
    if raw["model"] != model:
        sys.exit(f"{path} has results of the model {raw['model']}: name another file")
    return Results(
        model=model,
        calibrations={ends: Calibration(**one) for ends, one in raw["calibrations"].items()},
        points=[Point(**one) for one in raw["points"]],
        predictions={
            kind: [Predicted(**one) for one in each] for kind, each in raw["predictions"].items()
        },
    )


def write(path: Path, results: Results) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(results)) + "\n")
