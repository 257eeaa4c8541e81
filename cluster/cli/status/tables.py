"""The tables of `kvrelay status`: processes, workers, step times and links.

The verdicts on a worker's step times and links are pure functions; docs/latency-model.md and
docs/links.md explain their limits.
`kvrelay.counters.Counters` says which counters of a worker have a column.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.table import Table

from cluster.cli.status.asked import Facts
from kvrelay.counters import SHOWN, speed_text
from kvrelay.starts import start_text
from kvrelay.types import size_text

FAST_FACTOR, SLOW_FACTOR, BAD_FACTOR = 0.8, 1.25, 2.0
"""Limits for actual by measured step times. On shared CPUs these vary by 12 to 15 %, and the fit
itself is off by some percent."""
SLOW_SHARE, BAD_SHARE = 0.5, 1.0
"""Seconds to move a token's KV by seconds to compute it. From 1 on the link is the bottleneck. From
0.5 on there is no room for gathering, scattering or a second transfer."""
LAGGING_SHARE = 0.5
"""A link is slow below this share of the median speed of its transport's links."""
ENOUGH_LINKS = 3
"""With fewer links the median says little."""


def step_times_verdict(factor: float) -> str:
    """`factor`: actual by measured seconds of the worker's steps."""
    if factor < FAST_FACTOR:
        return "faster than measured at the start"
    if factor <= SLOW_FACTOR:
        return "good"
    if factor <= BAD_FACTOR:
        return "slow: something else uses the device"
    return "bad: less than half of the speed measured at the start"


def link_verdict(
    bytes_per_s: float, kv_token_bytes: int, prefill_token_s: float, same_kind: Sequence[float]
) -> str:
    """`prefill_token_s`: compute time of a prompt token at the worker that opened the link.
    `same_kind`: the measured speeds of all links of the same transport, this one included."""
    share = kv_token_bytes / bytes_per_s / prefill_token_s if prefill_token_s > 0 else 0.0
    if share >= BAD_SHARE:
        return f"bad: moving KV takes {share:.1f} x as long as computing it"
    if len(same_kind) >= ENOUGH_LINKS and bytes_per_s < LAGGING_SHARE * median(same_kind):
        return "slow: less than half of the speed of the other links of its kind"
    if share >= SLOW_SHARE:
        return f"slow: moving KV takes {share:.1f} x as long as computing it"
    return "good"


WIDTH = 400
"""Wide enough that a row stays on one line: some names are long."""

PROCESS_COLUMNS = ("name", "state", "doing", "starts", "address", "chosen")
WORKER_COLUMNS = ("name", "role", "state", "device", "cpus", "transport")
TRAFFIC_COLUMNS = ("in_tok/s", "out_tok/s")
COUNTER_COLUMNS = tuple(shown.column for _, shown in SHOWN if shown.column)
KV_COLUMNS = ("KV_used", "hits", "KV_moved", "blocks")


def print_table(facts: Facts) -> None:
    """The controller's view of the processes, then the workers as the first answering router knows
    them."""
    console = Console(soft_wrap=True, width=WIDTH)
    if "processes" in facts:
        console.print(f"cluster {facts['name']}: {facts['phase']}")
        console.print(_table(facts["processes"], PROCESS_COLUMNS))
    servers = facts.get("servers", {"router": facts})
    assert isinstance(servers, dict)
    for name, server in servers.items():
        _print_router(console, name, server)
    for server in [one for one in servers.values() if one is not None][:1]:
        _print_workers(console, server["workers"])


def _print_router(console: Console, name: str, server: Facts | None) -> None:
    if server is None:
        console.print(f"{name}: no answer")
        return
    ready = "ready" if server["ready"] else f"not ready: {server['not_ready']}"
    console.print(f"{name}: {ready}, {server['running_requests']} requests running")
    _print_quarantined(console, server["quarantined"])


def _print_workers(console: Console, workers: object) -> None:
    assert isinstance(workers, list | tuple)
    columns = (*WORKER_COLUMNS, *TRAFFIC_COLUMNS, *COUNTER_COLUMNS, *KV_COLUMNS)
    rows = [{**worker, **_activity(worker), **_counted(worker)} for worker in workers]
    console.print(_table(rows, columns))
    for worker in workers:
        console.print(f"{worker['name']} {_times(worker)}", highlight=False)
    for worker in (worker for worker in workers if worker["start"]):
        phases = {one["phase"]: one["seconds"] for one in worker["start"]}
        console.print(f"{worker['name']} started in {start_text(phases)}", highlight=False)
    for worker in (worker for worker in workers if worker["memory"]):
        parts = (f"{one['part']} {size_text(one['nbytes'])}" for one in worker["memory"])
        console.print(f"{worker['name']} memory: {', '.join(parts)}", highlight=False)
    _print_links(console, workers)


def _activity(worker: Facts) -> Facts:
    """Its current activity; rates are means of about the last 10 s."""
    blocks = f"{worker['free_blocks']} free, {worker['cached_blocks']} cached"
    hit_rate = worker["hit_rate"]
    return {
        "in_tok/s": f"{_number(worker['prompt_tokens_per_s']):.1f}",
        "out_tok/s": f"{_number(worker['generated_tokens_per_s']):.1f}",
        "KV_used": f"{_number(worker['kv_used']):.0%}",
        "hits": None if hit_rate is None else f"{_number(hit_rate):.0%}",
        "KV_moved": speed_text(_number(worker["transfer_bytes_per_s"])),
        "blocks": f"{blocks} of {worker['total_blocks']}",
    }


def _counted(worker: Facts) -> Facts:
    """# column |-> what the worker has counted"""
    counters = worker["counters"]
    assert isinstance(counters, dict)
    found = {shown.column: counters[name] for name, shown in SHOWN if shown.column}
    return {
        column: f"{value:.1f}" if isinstance(value, float) else value
        for column, value in found.items()
    }


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _times(worker: Facts) -> str:
    """How long its steps take now, compared with the measurement at its start."""
    times = worker["step_times"]
    assert isinstance(times, dict)
    decode = ", ".join(f"{n}: {s * 1e3:.2g} ms" for n, s in _ends(times["decode_knots"]))
    return (
        f"step times: prefill {_factor(worker['prefill_correction'])} of "
        f"{times['prefill_overhead_s'] * 1e3:.2g} ms + "
        f"{times['prefill_token_s'] * 1e6:.2g} us a token + "
        f"{times['prefill_pair_s'] * 1e6:.2g} us a pair; decode "
        f"{_factor(worker['decode_correction'])} of {{{decode}}} + "
        f"{times['decode_kv_token_s'] * 1e6:.2g} us a KV token; fitted within "
        f"{times['error']:.0%}"
    )


def _factor(correction: object) -> str:
    factor = _number(correction)
    return f"x {factor:.2f} ({step_times_verdict(factor)})"


def _ends(knots: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    return knots if len(knots) < 3 else (knots[0], knots[-1])


def _print_links(console: Console, workers: object) -> None:
    assert isinstance(workers, list | tuple)
    speeds: defaultdict[str, list[float]] = defaultdict(list)  # transport |-> those measured
    for link in (link for worker in workers for link in worker["links"] if link["bytes_per_s"]):
        speeds[link["transport"]].append(link["bytes_per_s"])
    for worker in workers:
        for link in worker["links"]:
            ends = f"{worker['name']} -> {link['peer']} over {link['transport']}"
            told = _link(worker, link, speeds[link["transport"]])
            console.print(f"{ends}: {told}", highlight=False)


def _link(worker: Facts, link: Facts, same_kind: Sequence[float]) -> str:
    speed, latency_s = _number(link["bytes_per_s"]), _number(link["latency_s"])
    if not speed:
        return "not measured yet"
    times, token_bytes = worker["step_times"], worker["kv_token_bytes"]
    assert isinstance(times, dict) and isinstance(token_bytes, int)
    token_s = times["prefill_token_s"] * _number(worker["prefill_correction"])
    verdict = link_verdict(speed, token_bytes, token_s, same_kind)
    return f"{speed_text(speed)}, {latency_s * 1e6:.0f} us: {verdict}"


def _print_quarantined(console: Console, pairs: object) -> None:
    assert isinstance(pairs, list | tuple)
    for pair in pairs:
        times = f"{pair['failures']} times" if pair["failures"] > 1 else "once"
        console.print(
            f"{pair['prefill']} -> {pair['decode']} is quarantined for {pair['remaining_s']:.0f} s "
            f"more: failed {times}, lately by {pair['reason']}"
        )


def _table(rows: object, columns: tuple[str, ...]) -> Table:
    assert isinstance(rows, list | tuple)
    table = Table(*(column.replace("_", " ") for column in columns), box=None)
    for row in rows:
        table.add_row(*("-" if row[column] is None else str(row[column]) for column in columns))
    return table
