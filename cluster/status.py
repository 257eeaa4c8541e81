"""`kvrelay status`: what a cluster's controller and routers say, for people or programs."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from cluster.actor import RouterAt
from cluster.admin import ask
from cluster.status_words import link_verdict, step_times_verdict
from kvrelay.activity import speed_text
from kvrelay.codec import server_info_of
from kvrelay.errors import ConfigError, KvrelayError
from kvrelay.v1.inference_pb2 import GetServerInfoRequest

if TYPE_CHECKING:
    from cluster.controller_report import ClusterStatus

ANSWER_S = 10.0

WIDTH = 400
"""A row stays in one line, whatever the terminal: some names are long."""

WORKER_COLUMNS = ("name", "role", "device", "cpus", "transport")
TRAFFIC_COLUMNS = ("in_tok/s", "out_tok/s", "running", "waiting")
KV_COLUMNS = ("KV_used", "hits", "KV_moved", "blocks")

Facts = dict[str, object]
"""JSON: what `--format json` prints."""


def of_router(address: str) -> Facts:
    """What the router says whose internal gRPC is at HOST:PORT. Raises ConfigError when none
    answers."""
    request = GetServerInfoRequest()
    answer = ask(address, lambda stub: stub.GetServerInfo, request, timeout_s=ANSWER_S)
    return asdict(server_info_of(answer))


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
    """The internal gRPC address of each router of a cluster on this Ray. Raises as `of_cluster`
    does."""
    from cluster.rays import joined

    with joined(address):
        status = _of_controller(name)
    if not status.routers:
        raise KvrelayError(f"no router of {status.name} serves yet")
    return [router.internal_grpc for router in status.routers]


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
        return of_router(router.internal_grpc)
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
        _print_workers(console, server["workers"])


def _print_router(console: Console, name: str, server: Facts | None) -> None:
    if server is None:
        console.print(f"{name}: no answer")
        return
    ready = "ready" if server["ready"] else "not ready"
    console.print(f"{name}: {ready}, {server['running_requests']} requests running")
    _print_quarantined(console, server["quarantined"])


def _print_workers(console: Console, workers: object) -> None:
    assert isinstance(workers, list | tuple)
    columns = (*WORKER_COLUMNS, *TRAFFIC_COLUMNS, *KV_COLUMNS)
    console.print(_table([{**worker, **_activity(worker)} for worker in workers], columns))
    for worker in workers:
        console.print(f"{worker['name']} {_times(worker)}", highlight=False)
    _print_links(console, workers)


def _activity(worker: Facts) -> Facts:
    """What it does now; rates are means of about the last 10 s."""
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


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _times(worker: Facts) -> str:
    """How long its steps take now, and how much that is of what was measured at its start."""
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
