"""`kvrelay simulate`: a cluster file and a trace, without machines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.options import Format, FormatOption, SetOption, given, parsed

ClusterFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The cluster file (YAML).")]
TraceOption = Annotated[
    Path,
    typer.Option(
        "--trace", help="Requests: Mooncake's JSON lines, Azure's CSV, or what a router recorded."
    ),
]
RateOption = Annotated[
    list[float] | None,
    typer.Option("--rate-scale", help="Arrivals at so many times the trace's rate; repeatable."),
]
ReplicasOption = Annotated[
    int, typer.Option("--replicate", min=1, help="Each request comes so often, as others' would.")
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", min=1, help="Only so many of the trace's requests.")
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Without it simulation.seed.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Write report.json and plots there.")
]


def simulate(
    config: ClusterFile,
    trace: TraceOption,
    rate_scale: RateOption = None,
    replicate: ReplicasOption = 1,
    limit: LimitOption = None,
    seed: SeedOption = None,
    out: OutOption = None,
    format_: FormatOption = Format.TABLE,
    set_: SetOption = None,
) -> None:
    """Serve a trace with the cluster's own router and schedulers, on a virtual clock.

    The same seed yields the same report. The cluster file's `simulation` section stands for the
    machines.
    """
    from cluster.config.load import load_config
    from cluster.sim.readers import read_trace
    from cluster.sim.run import as_json, simulate_rates, write

    loaded = load_config(config, given(simulation__seed=seed) + parsed(set_))
    results = simulate_rates(loaded, read_trace(trace, limit), rate_scale or [1.0], replicate)
    if out is not None:
        write(out, results)
    if format_ is Format.JSON:
        print(as_json([result.report for result in results]))
        print(f"simulated in {sum(r.wall_s for r in results):.1f} s", file=sys.stderr)
        return
    from cluster.sim.shown import show

    show([result.report for result in results], [result.wall_s for result in results])
