"""`kvrelay status`: what a cluster's controller and routers say, for people or programs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from cluster.actor import RouterAt
from kvrelay.client import Client
from kvrelay.errors import ConfigError, KvrelayError

if TYPE_CHECKING:
    from cluster.controller_report import ClusterStatus

ANSWER_S = 10.0

WIDTH = 400
"""A row stays in one line, whatever the terminal: some names are long."""

WORKER_COLUMNS = (
    "name",
    "role",
    "device",
    "cpus",
    "transport",
    "free_blocks",
    "cached_blocks",
    "total_blocks",
    "running",
    "waiting",
)

Facts = dict[str, object]
"""JSON: what `--format json` prints."""


def of_router(address: str) -> Facts:
    """What the router at HOST:PORT says. Raises ConfigError when none answers."""
    try:
        with Client(address, timeout_s=ANSWER_S) as client:
            return asdict(client.server_info())
    except KvrelayError as error:
        raise ConfigError(f"{address}: no router answers: {error}") from None


def of_cluster(name: str | None, address: str) -> Facts:
    """What the controller of a cluster on this Ray says, and each router that answers.

    Raises ConfigError when it isn't clear which, and KvrelayError when the controller is silent.
    """
    from cluster.rays import joined

    with joined(address):
        status = _of_controller(name)
        servers = {router.name: _server(router) for router in status.routers}
        return asdict(status) | {"servers": servers}


def routers_of(name: str | None, address: str) -> list[str]:
    """HOST:PORT of each router of a cluster on this Ray. Raises as `of_cluster` does."""
    from cluster.rays import joined

    with joined(address):
        status = _of_controller(name)
    if not status.routers:
        raise KvrelayError(f"no router of {status.name} serves yet")
    return [router.grpc for router in status.routers]


def _of_controller(cluster: str | None) -> ClusterStatus:
    import ray

    from cluster.launch import chosen, find_controller, running_clusters

    name = chosen(cluster, running_clusters())
    controller = find_controller(name)
    if controller is None:
        raise KvrelayError(f"the cluster {name} has just gone")
    try:
        status: ClusterStatus = ray.get(controller.status.remote(), timeout=ANSWER_S)
    except ray.exceptions.GetTimeoutError:
        raise KvrelayError(f"the controller of {name} is silent for {ANSWER_S:g} s") from None
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[0]
        raise KvrelayError(f"the controller of {name} is lost: {reason}") from None
    return status


def _server(router: RouterAt) -> Facts | None:
    """None while it can't be asked."""
    with contextlib.suppress(ConfigError):
        return of_router(router.grpc)
    return None


def as_json(facts: Facts) -> str:
    return json.dumps(facts, indent=2)


def print_table(facts: Facts) -> None:
    """Processes as the controller sees them, then workers as the first router that answers sees
    them."""
    console = Console(soft_wrap=True, width=WIDTH)
    if "processes" in facts:
        console.print(f"cluster {facts['name']}: {facts['phase']}")
        console.print(_table(facts["processes"], ("name", "state", "doing", "starts", "address")))
    servers = facts.get("servers", {"router": facts})
    assert isinstance(servers, dict)
    for name, server in servers.items():
        _print_router(console, name, server)
    for server in [one for one in servers.values() if one is not None][:1]:
        console.print(_table(server["workers"], WORKER_COLUMNS))
        _print_times(console, server["workers"])
        _print_links(console, server["workers"])


def _print_router(console: Console, name: str, server: Facts | None) -> None:
    if server is None:
        console.print(f"{name}: no answer")
        return
    ready = "ready" if server["ready"] else "not ready"
    console.print(f"{name}: {ready}, {server['running_requests']} requests running")
    _print_quarantined(console, server["quarantined"])


def _print_times(console: Console, workers: object) -> None:
    assert isinstance(workers, list | tuple)
    for worker in workers:
        console.print(f"{worker['name']} {_times(worker)}")


def _times(worker: Facts) -> str:
    """How long its steps take now, and how much that is of what was measured at its start."""
    times = worker["step_times"]
    assert isinstance(times, dict)
    decode = ", ".join(f"{n}: {s * 1e3:.2g} ms" for n, s in _ends(times["decode_knots"]))
    return (
        f"prefill x {worker['prefill_correction']:.2f} of {times['prefill_overhead_s'] * 1e3:.2g} "
        f"ms + {times['prefill_token_s'] * 1e6:.2g} us a token + "
        f"{times['prefill_pair_s'] * 1e6:.2g} us a pair; decode x "
        f"{worker['decode_correction']:.2f} of {{{decode}}} + "
        f"{times['decode_kv_token_s'] * 1e6:.2g} us a KV token; fitted within "
        f"{times['error']:.0%}"
    )


def _ends(knots: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    return knots if len(knots) < 3 else (knots[0], knots[-1])


def _print_links(console: Console, workers: object) -> None:
    assert isinstance(workers, list | tuple)
    for worker in workers:
        for link in worker["links"]:
            measured = f"{link['bytes_per_s'] / 1e9:.1f} GB/s, {link['latency_s'] * 1e6:.0f} us"
            told = measured if link["bytes_per_s"] else "not measured yet"
            console.print(f"{worker['name']} -> {link['peer']} over {link['transport']}: {told}")


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
