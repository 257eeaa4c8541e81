"""Simulations of one trace at several rates, and where their reports go.

Plots of simulations, as PNG files. Needs kvrelay[plots].

Reports of one trace under several values of one key, line by line. Pure.

Reports as tables for people.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.config.schema import Config
from cluster.sim.profiles.load import BUILT_IN_TEXT
from cluster.sim.results.report import KvPoolUse, Report, Spread, report
from cluster.sim.simulation import ClusterSimulation, Scale
from cluster.sim.trace import Outcome, TraceRequest
from engine.core.step_times import NotCovered
from kvrelay.errors import ConfigError
from kvrelay.gc_pauses import paused


def check_can_draw() -> None:
    """Raises ConfigError without matplotlib."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--out draws with matplotlib: pip install 'kvrelay[plots]'")


def draw(folder: Path, reports: Sequence[Report], outcomes: Sequence[Sequence[Outcome]]) -> None:
    """timeline.png and cdf.png of each rate; goodput.png when there are several."""
    import matplotlib

    matplotlib.use("agg")
    for one, each in zip(reports, outcomes, strict=True):
        mark = f"-{one.rate_scale:g}x" if len(reports) > 1 else ""
        _timeline(folder / f"timeline{mark}.png", one)
        _cdfs(folder / f"cdf{mark}.png", each)
    if len(reports) > 1:
        _goodput(folder / "goodput.png", reports)


def _timeline(path: Path, one: Report) -> None:
    import matplotlib.pyplot as plt

    figure, (queues, blocks) = plt.subplots(2, 1, sharex=True, figsize=(9, 6))
    at_s = [look.at_s for look in one.timeline]
    queues.plot(at_s, [look.awaiting_prefill for look in one.timeline], label="awaiting prefill")
    queues.plot(at_s, [look.decoding for look in one.timeline], label="decoding")
    queues.plot(at_s, [look.awaiting_decode for look in one.timeline], label="awaiting decode")
    queues.set_ylabel("requests")
    queues.legend()
    blocks.plot(at_s, [look.free_blocks for look in one.timeline])
    blocks.set_ylabel("blocks to be had")
    blocks.set_xlabel("seconds")
    figure.savefig(path)
    plt.close(figure)


def _cdfs(path: Path, outcomes: Sequence[Outcome]) -> None:
    import matplotlib.pyplot as plt

    kinds = (
        ("TTFT (s)", [one.ttft_s for one in outcomes]),
        ("TPOT (s)", [one.tpot_s for one in outcomes]),
        ("end to end (s)", [one.e2e_s for one in outcomes]),
    )
    figure, axes = plt.subplots(1, len(kinds), sharey=True, figsize=(12, 4))
    for axis, (name, values) in zip(axes, kinds, strict=True):
        known = sorted(value for value in values if value is not None)
        axis.plot(known, [(i + 1) / len(known) for i in range(len(known))])
        axis.set_xlabel(name)
    axes[0].set_ylabel("share of requests")
    figure.savefig(path)
    plt.close(figure)


def _goodput(path: Path, reports: Sequence[Report]) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4))
    offered = [one.offered_per_s for one in reports]
    axis.plot(offered, [one.goodput_per_s for one in reports], marker="o", label="goodput")
    axis.plot(offered, offered, linestyle=":", label="offered")
    axis.set_xlabel("offered requests per second")
    axis.set_ylabel("requests per second that met their objectives")
    axis.legend()
    figure.savefig(path)
    plt.close(figure)


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
        with paused():  # few cycles are made, and looking for them takes a third of the time
            simulated = simulation.run()
    except NotCovered as error:
        raise ConfigError(f"simulation.profile: {error}") from None
    return Result(report=report(simulated), outcomes=simulated.outcomes)


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
    plain = [_plain(one) for one in reports]
    return json.dumps(plain[0] if len(plain) == 1 else plain, indent=2)


def comparison_json(key: str, runs: Sequence[tuple[str, Sequence[Report]]]) -> str:
    """`runs`: each value of the key, with a report for each rate."""
    plain = [{"value": value, "reports": [_plain(one) for one in each]} for value, each in runs]
    return json.dumps({"compare": key, "runs": plain}, indent=2)


def _plain(report: Report) -> dict[str, object]:
    """A cluster without pool nodes has no `kv_pool`."""
    plain = asdict(report)
    if report.kv_pool is None:
        del plain["kv_pool"]
    return plain


def write(folder: Path, results: Sequence[Result]) -> None:
    """report.json and plots. Raises ConfigError."""
    reports = [result.report for result in results]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(as_json(reports) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {folder}: can't write there: {error.strerror}") from None
    draw(folder, reports, [result.outcomes for result in results])


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportLine:
    """One figure of every report, in their order; None where a report lacks it."""

    name: str
    values: tuple[float | None, ...]

    @property
    def ratio(self) -> float | None:
        """The last by the first."""
        first, last = self.values[0], self.values[-1]
        return last / first if first and last is not None else None


FIGURES: tuple[tuple[str, Callable[[Report], float | None]], ...] = (
    ("offered", lambda one: one.offered),
    ("completed", lambda one: one.completed),
    ("refused", lambda one: sum(one.refused.values())),
    ("failed", lambda one: sum(one.failed.values())),
    ("attainment, %", lambda one: 100 * one.attainment),
    ("goodput/s", lambda one: one.goodput_per_s),
    ("output tokens/s", lambda one: one.output_tokens_per_s),
    ("prefix hits, %", lambda one: 100 * one.hit_rate),
    ("KV moved, GB", lambda one: one.moved_bytes / 1e9),
    ("preempted", lambda one: one.preemptions),
    ("$ per million tokens", lambda one: one.cost.price_per_million_tokens),
)
KV_POOL_FIGURES: tuple[tuple[str, Callable[[Report, KvPoolUse], float]], ...] = (
    ("from host memory, %", lambda one, pool: _share(one, pool.host_tokens)),
    ("from disk, %", lambda one, pool: _share(one, pool.disk_tokens)),
    ("from other hosts, %", lambda one, pool: _share(one, pool.remote_tokens)),
    ("declined in pools, %", lambda one, pool: _share(one, pool.declined_tokens)),
    ("stored blocks", lambda one, pool: pool.stored_blocks),
)
LATENCIES: tuple[tuple[str, Callable[[Report], Spread | None]], ...] = (
    ("TTFT", lambda one: one.ttft_s),
    ("TPOT", lambda one: one.tpot_s),
    ("E2E", lambda one: one.e2e_s),
)
QUANTILES: tuple[tuple[str, Callable[[Spread], float]], ...] = (
    ("mean", lambda spread: spread.mean),
    ("p50", lambda spread: spread.p50),
    ("p99", lambda spread: spread.p99),
)


def lines(reports: Sequence[Report]) -> list[ReportLine]:
    found = [ReportLine(name=name, values=tuple(map(figure, reports))) for name, figure in FIGURES]
    pools = _compared_kv_pools(reports)
    return [*found, *pools, *_compared_latencies(reports), *_compared_pools(reports)]


def _share(report: Report, tokens: int) -> float:
    """In percent of the prompt tokens that were offered."""
    return 100 * tokens / report.prompt_tokens


def _compared_kv_pools(reports: Sequence[Report]) -> list[ReportLine]:
    """Nothing where no report has one."""
    if not any(one.kv_pool for one in reports):
        return []
    return [
        ReportLine(
            name=name,
            values=tuple(
                None if one.kv_pool is None else figure(one, one.kv_pool) for one in reports
            ),
        )
        for name, figure in KV_POOL_FIGURES
    ]


def _compared_latencies(reports: Sequence[Report]) -> list[ReportLine]:
    found = []
    for kind, spread_of in LATENCIES:
        spreads = [spread_of(one) for one in reports]
        for name, quantile in QUANTILES:
            values = tuple(None if s is None else 1000 * quantile(s) for s in spreads)
            found.append(ReportLine(name=f"{kind} {name}, ms", values=values))
    return found


def _compared_pools(reports: Sequence[Report]) -> list[ReportLine]:
    """How busy each pool was; a report may have fewer pools."""
    found = []
    for index, pools in enumerate(zip_longest(*(one.pools for one in reports))):
        role = next(pool.role for pool in pools if pool is not None)
        busy = tuple(None if pool is None else 100 * pool.utilisation for pool in pools)
        found.append(ReportLine(name=f"pool {index} ({role}) busy, %", values=busy))
    return found


def show(reports: Sequence[Report], wall_s: float) -> None:
    """`wall_s`: how long the simulations took."""
    console = Console(soft_wrap=True, highlight=False)
    for one in reports:
        _show_one(console, one)
    if len(reports) > 1:
        console.print(_by_rate(reports))
    duration_s = sum(one.duration_s for one in reports)
    console.print(f"simulated {duration_s:.0f} s in {wall_s:.1f} s", markup=False)


def show_comparison(key: str, values: Sequence[str], by_rate: Sequence[Sequence[Report]]) -> None:
    """Side by side, for each rate: its reports in the order of the values of `key`."""
    console = Console(soft_wrap=True, highlight=False)
    for reports in by_rate:
        one = reports[0]
        title = f"[bold]{escape(one.name)}[/bold] at {one.rate_scale:g} x the trace's rate"
        console.print(f"{title}, by {escape(key)}")
        rows = [
            (line.name, *map(_figure, line.values), _figure(line.ratio)) for line in lines(reports)
        ]
        head = (escape(key), *map(escape, values), "last by first")
        console.print(_table(head, rows))


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def _show_one(console: Console, one: Report) -> None:
    console.print(f"[bold]{one.name}[/bold] at {one.rate_scale:g} x the trace's rate")
    for table in (_requests(one), _latencies(one), _pools(one)):
        console.print(table)
    console.print()


def _requests(one: Report) -> Table:
    slo = f"TTFT {one.ttft_slo_s:g} s, TPOT {one.tpot_slo_s * 1000:g} ms"
    rows = [
        ("offered", f"{one.offered} requests, {one.offered_per_s:.2f}/s"),
        ("completed", f"{one.completed}, {one.completed_per_s:.2f}/s"),
        ("refused", _reasons(one.refused)),
        ("came back", f"{one.retries} times, {one.retried_admitted} of them admitted"),
        ("failed", _reasons(one.failed)),
        (f"met {slo}", f"{one.attainment:.1%} of offered, {one.admitted_attainment:.1%} admitted"),
        ("goodput", f"{one.goodput_per_s:.2f}/s"),
        ("output", f"{one.output_tokens} tokens, {one.output_tokens_per_s:.0f}/s"),
        ("prefix hits", f"{one.hit_rate:.1%} of prompt tokens, {one.reuse_rate:.1%} on the device"),
        *_kv_pool(one),
        ("prefilled by decode workers", str(one.local_prefills)),
        ("moved", f"{one.moved_bytes / 1e9:.1f} GB"),
        ("cost", _cost(one)),
    ]
    return _table(("", ""), rows)


def _kv_pool(one: Report) -> list[tuple[str, str]]:
    pool = one.kv_pool
    if pool is None:
        return []
    host, disk, remote, declined = (
        f"{_share(one, tokens):.1f}%"
        for tokens in (pool.host_tokens, pool.disk_tokens, pool.remote_tokens, pool.declined_tokens)
    )
    fetched = f"{host} from host memory, {disk} from disk, {remote} from other hosts"
    kept = f"{pool.stored_blocks} blocks stored, {pool.host_blocks} in memory"
    return [
        ("from pool nodes", f"{fetched}; {declined} declined"),
        (f"{pool.nodes} pool nodes", f"{kept} and {pool.disk_blocks} on disk at the end"),
    ]


def _reasons(counted: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counted.items()) or "none"


def _cost(one: Report) -> str:
    cost, parts = one.cost, []
    if cost.price is not None and cost.price_per_million_tokens is not None:
        parts.append(f"${cost.price:.2f}, ${cost.price_per_million_tokens:.3f} per million tokens")
    if cost.energy_j is not None and cost.kwh_per_million_tokens is not None:
        parts.append(f"{cost.kwh_per_million_tokens:.2f} kWh per million tokens")
    return ", ".join(parts) or "the profile tells of no price and no power"


def _latencies(one: Report) -> Table:
    kinds = (("TTFT ms", one.ttft_s), ("TPOT ms", one.tpot_s), ("E2E ms", one.e2e_s))
    rows = [(name, *_cells(spread)) for name, spread in kinds if spread is not None]
    return _table(("", "mean", "p50", "p90", "p99", "max"), rows)


def _cells(spread: Spread) -> Iterable[str]:
    values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.most)
    return (f"{value * 1000:.1f}" for value in values)


def _pools(one: Report) -> Table:
    rows = [
        (
            pool.role,
            str(pool.workers),
            pool.profile,
            f"{pool.utilisation:.1%}",
            str(pool.prompt_tokens),
            str(pool.generated_tokens),
            str(pool.preemptions),
        )
        for pool in one.pools
    ]
    head = ("pool", "workers", "profile", "busy", "computed", "generated", "preempted")
    return _table(head, rows)


def _by_rate(reports: Sequence[Report]) -> Table:
    rows = [
        (
            f"{one.rate_scale:g}",
            f"{one.offered_per_s:.2f}",
            f"{one.goodput_per_s:.2f}",
            f"{one.attainment:.1%}",
        )
        for one in reports
    ]
    return _table(("rate x", "offered/s", "goodput/s", "attainment"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*head, box=None, show_header=any(head))
    for row in rows:
        table.add_row(*row)
    return table
