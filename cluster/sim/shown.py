"""Reports as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.sim.comparison import lines
from cluster.sim.report import Report, Spread


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
        ("prefilled by decode workers", str(one.local_prefills)),
        ("moved", f"{one.moved_bytes / 1e9:.1f} GB"),
        ("cost", _cost(one)),
    ]
    return _table(("", ""), rows)


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
