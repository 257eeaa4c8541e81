"""Simulations of one trace at several rates, and where their reports go."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.config.schema import Config
from cluster.sim.ledgers import Outcome
from cluster.sim.plots import draw
from cluster.sim.profile import BUILT_IN_TEXT
from cluster.sim.report import Report, report
from cluster.sim.simulation import ClusterSimulation, Scale
from cluster.sim.trace import TraceRequest
from engine.latency import NotCovered
from kvrelay.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    report: Report
    outcomes: Sequence[Outcome]


def simulate_rates(
    config: Config, requests: Sequence[TraceRequest], rates: Sequence[float], replicas: int
) -> list[Result]:
    """Raises ConfigError."""
    if any(rate <= 0 for rate in rates):
        raise ConfigError(f"--rate-scale: got {min(rates):g}, expected a number above 0")
    return [simulate(config, requests, Scale(rate=rate, replicas=replicas)) for rate in rates]


def simulate(config: Config, requests: Sequence[TraceRequest], scale: Scale) -> Result:
    """Raises ConfigError."""
    simulation = ClusterSimulation(config, requests, scale)
    try:
        with _without_collector():
            simulated = simulation.run()
    except NotCovered as error:
        raise ConfigError(f"simulation.profile: {error}") from None
    return Result(report=report(simulated), outcomes=simulated.outcomes)


@contextmanager
def _without_collector() -> Iterator[None]:
    """What a simulation makes has few cycles and lives long: looking for them takes a third of its
    time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def assumed_text(config: Config) -> str | None:
    """Says what stands for the machines where the cluster file names no profile for all workers;
    None: it does."""
    simulation = config.simulation
    own = [pool.profile for pool in simulation.pools]
    named = len(own) >= len(config.workers) and None not in own[: len(config.workers)]
    if simulation.profile is not None or named:
        return None
    return (
        f"no simulation.profile: workers have the profile {BUILT_IN_TEXT}, "
        f"and {simulation.blocks} KV blocks each"
    )


def as_json(reports: Sequence[Report]) -> str:
    """One report, or a list of them."""
    plain = [asdict(one) for one in reports]
    return json.dumps(plain[0] if len(plain) == 1 else plain, indent=2)


def comparison_json(key: str, runs: Sequence[tuple[str, Sequence[Report]]]) -> str:
    """`runs`: each value of the key, with a report for each rate."""
    plain = [{"value": value, "reports": [asdict(one) for one in each]} for value, each in runs]
    return json.dumps({"compare": key, "runs": plain}, indent=2)


def write(folder: Path, results: Sequence[Result]) -> None:
    """report.json and plots. Raises ConfigError."""
    reports = [result.report for result in results]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(as_json(reports) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {folder}: can't write there: {error.strerror}") from None
    draw(folder, reports, [result.outcomes for result in results])
