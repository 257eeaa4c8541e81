"""The load generator, from its parent's side."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.live.offered import Offered
from bench.live.outcome import Outcome


def send(
    http_ports: Sequence[int],
    offered: Sequence[Offered],
    *,
    patience_s: float,
    at_once: int | None = None,
    under: Sequence[str] = (),
) -> list[Outcome]:
    """From a process of its own, started `under` another command."""
    with tempfile.TemporaryDirectory() as name:
        plan, outcomes = Path(name) / "plan", Path(name) / "outcomes"
        plan.write_text(json.dumps([asdict(one) for one in offered]))
        command = [*under, sys.executable, "-m", "bench.live.client"]
        command += [
            ",".join(map(str, http_ports)),
            str(plan),
            str(outcomes),
            f"--patience={patience_s}",
        ]
        command += [] if at_once is None else [f"--at-once={at_once}"]
        subprocess.run(command, check=True)
        return [Outcome(**row) for row in json.loads(outcomes.read_text())]
