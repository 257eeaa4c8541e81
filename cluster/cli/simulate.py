"""`kvrelay simulate`: simulates a cluster file with a trace, without machines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.options import Format, FormatOption, SetOption, given, parsed
from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from cluster.sim.results.output import Result


ClusterFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The cluster file (YAML).")]
_TraceOption = Annotated[
    Path,
    typer.Option(
        "--trace", help="Requests: Mooncake's JSON lines, Azure's CSV, or a router's record."
    ),
]
RateOption = Annotated[
    list[float] | None,
    typer.Option("--rate-scale", help="Multiply the trace's rate by this; repeatable."),
]
ReplicasOption = Annotated[
    int,
    typer.Option(
        "--replicate", min=1, help="Each request comes N times, as if from different users."
    ),
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", min=1, help="Use only the first N requests.")
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", help="Seed of all draws. Default: simulation.seed.")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Write report.json and plots there.")
]

CompareOption = Annotated[
    str | None,
    typer.Option(
        "--compare",
        metavar="KEY=A,B",
        help="Simulate once with each value of this key, and print the runs side by side.",
    ),
]


def simulate(
    config: ClusterFile,
    trace: _TraceOption,
    rate_scale: RateOption = None,
    replicate: ReplicasOption = 1,
    limit: LimitOption = None,
    seed: SeedOption = None,
    out: OutOption = None,
    format_: FormatOption = Format.TABLE,
    set_: SetOption = None,
    compare: CompareOption = None,
) -> None:
    """Serve a trace with the cluster's own router and schedulers, on a virtual clock.

    The same seed yields the same report. The cluster file's `simulation` section stands for the
    machines.
    """
    from cluster.config.load import load_config
    from cluster.config.overrides import Override
    from cluster.sim.readers import read_trace
    from cluster.sim.results.output import assumed_text, check_can_draw, simulate_rates

    if out is not None:
        check_can_draw()
    overrides = given(simulation__seed=seed) + parsed(set_)
    variants: list[Override | None] = [*Override.parse_several(compare)] if compare else [None]
    values = [_text(one.value) for one in variants if one is not None]
    if len(set(values)) < len(values):
        raise ConfigError(f"--compare {compare}: each value once")
    configs = [load_config(config, overrides + ([one] if one else [])) for one in variants]
    for assumed in dict.fromkeys(map(assumed_text, configs)):
        if assumed is not None:
            print(assumed, file=sys.stderr if format_ is Format.JSON else sys.stdout)
    requests, rates = read_trace(trace, limit), rate_scale or [1.0]
    began_s = time.perf_counter()
    results = [simulate_rates(one, requests, rates, replicate) for one in configs]
    wall_s = time.perf_counter() - began_s
    if compare is None:
        _tell(results[0], wall_s, out, format_)
    else:
        key, _, _ = compare.partition("=")
        _tell_comparison(key, dict(zip(values, results, strict=True)), out, format_)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _tell(results: Sequence[Result], wall_s: float, out: Path | None, format_: Format) -> None:
    from cluster.sim.results.output import as_json, write

    if out is not None:
        write(out, results)
    if format_ is Format.JSON:
        print(as_json([result.report for result in results]))
        print(f"simulated in {wall_s:.1f} s", file=sys.stderr)
        return
    from cluster.sim.results.output import show

    show([result.report for result in results], wall_s)


def _tell_comparison(
    key: str, by_value: Mapping[str, Sequence[Result]], out: Path | None, format_: Format
) -> None:
    """`by_value`: one result for each rate. `--out` gets one folder for each value."""
    from cluster.sim.results.output import comparison_json, write

    for value, results in by_value.items() if out is not None else ():
        assert out is not None
        write(out / f"{key}={value}".replace("/", "_"), results)
    reports = {value: [one.report for one in results] for value, results in by_value.items()}
    if format_ is Format.JSON:
        print(comparison_json(key, list(reports.items())))
        return
    from cluster.sim.results.output import show_comparison

    show_comparison(key, list(reports), list(zip(*reports.values(), strict=True)))
