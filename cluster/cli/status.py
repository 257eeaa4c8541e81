"""`kvrelay status`: the state of a cluster from its controller and routers, as tables or JSON.

`kvrelay status --kv`: who holds which KV.

The verdicts on a worker's step times and links are pure functions; docs/latency-model.md and
docs/links.md explain their limits.
`kvrelay.counters.Counters` says which counters of a worker have a column.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from statistics import median
from typing import TYPE_CHECKING

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

from cluster.cli.top.screen import STATES
from cluster.on_ray.actor import RouterAt
from cluster.process.admin import ask, report
from kvpool.core.layout.hashes import tenant_label
from kvrelay.access.values import Access
from kvrelay.codec import MessageCodec
from kvrelay.counters import SHOWN, speed_text
from kvrelay.errors import ConfigError, KvrelayError
from kvrelay.results import QuarantinedPair, WorkerInfo
from kvrelay.starts import start_text
from kvrelay.types import size_text
from kvrelay.v1 import admin_pb2 as pb
from kvrelay.v1 import inference_pb2
from kvrelay.v1.pool_node_pb2 import CachedBlocks, PoolReport
from kvrelay.v1.pool_node_pb2 import TierBlocks as Tier
from kvrelay.v1.worker_pb2 import DebugKvResponse

if TYPE_CHECKING:
    from cluster.on_ray.reports import ClusterStatus

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


ANSWER_S = 10.0

WIDTH = 400
"""Wide enough that a row stays on one line: some names are long."""

PROCESS_COLUMNS = ("name", "state", "doing", "starts", "address", "chosen")
WORKER_COLUMNS = ("name", "role", "state", "device", "cpus", "transport")
TRAFFIC_COLUMNS = ("in_tok/s", "out_tok/s")
COUNTER_COLUMNS = tuple(shown.column for _, shown in SHOWN if shown.column)
KV_COLUMNS = ("KV_used", "hits", "KV_moved", "blocks")

Facts = dict[str, object]
"""JSON: what `--format json` prints."""


def of_router(address: str, access: Access) -> Facts:
    """The router's report from its internal gRPC port at HOST:PORT. Raises ConfigError when no
    router answers."""
    return facts_of(report(address, access, timeout_s=ANSWER_S))


def facts_of(told: pb.WatchReport) -> Facts:
    return {
        "version": told.version,
        "cluster": told.cluster,
        "uptime_s": told.uptime_s,
        "ready": not told.not_ready and not told.leaving,
        "not_ready": told.not_ready or ("it is leaving" if told.leaving else ""),
        "running_requests": told.open_requests,
        "workers": [_worker(one) for one in told.workers],
        "quarantined": [asdict(_QUARANTINED.decode(pair)) for pair in told.quarantined],
    }


_INFO = MessageCodec(WorkerInfo, inference_pb2.WorkerInfo, "a router")
_QUARANTINED = MessageCodec(QuarantinedPair, inference_pb2.QuarantinedPair, "a router")


def _worker(told: pb.WatchedWorker) -> Facts:
    state, _ = STATES[told.state]
    return asdict(_INFO.decode(told.info)) | {"state": state, "role_epoch": told.role_epoch}


def of_cluster(name: str | None, address: str) -> Facts:
    """The reports of a cluster's controller and of each router that answers.

    Raises ConfigError when several clusters match, and KvrelayError when the controller is silent.
    """
    from cluster.on_ray.connect import joined

    with joined(address):
        status, access = _of_controller(name)
        servers = {router.name: _server(router, access) for router in status.routers}
        return asdict(status) | {"servers": servers}


def routers_of(name: str | None, address: str) -> tuple[list[str], Access]:
    """The internal gRPC address of each router of a cluster on this Ray, and how it is called.
    Raises like `of_cluster`."""
    from cluster.on_ray.connect import joined

    with joined(address):
        status, access = _of_controller(name)
    if not status.routers:
        raise KvrelayError(f"no router of {status.name} serves yet")
    return [router.internal_grpc for router in status.routers], access


def _of_controller(cluster: str | None) -> tuple[ClusterStatus, Access]:
    import ray

    from cluster.on_ray.launch import chosen, find_controller, running_clusters

    name = chosen(cluster, running_clusters())
    controller = find_controller(name)
    if controller is None:
        raise KvrelayError(f"the cluster {name} has just gone")
    try:
        asked = [controller.status.remote(), controller.access.remote()]
        status, access = ray.get(asked, timeout=ANSWER_S)
    except ray.exceptions.GetTimeoutError:
        raise KvrelayError(f"the controller of {name} is silent for {ANSWER_S:g} s") from None
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[0]
        raise KvrelayError(f"the controller of {name} is lost: {reason}") from None
    return status, access


def _server(router: RouterAt, access: Access) -> Facts | None:
    """None while it doesn't answer."""
    with contextlib.suppress(ConfigError):
        return of_router(router.internal_grpc, access)
    return None


def as_json(facts: Facts) -> str:
    return json.dumps(facts, indent=2)


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


KV_ANSWER_S = 40.0


@dataclass(frozen=True, slots=True)
class TierRow:
    where: str
    tier: str
    blocks: int
    free: int
    cached: int
    other: str
    orphaned: int | str


@dataclass(frozen=True, slots=True)
class HeldRow:
    where: str
    tier: str
    state: str
    holder: str
    tenant: str
    count: str
    age: str


def kv_of_router(address: str, access: Access) -> pb.GetKvResponse:
    """Raises ConfigError when no router's internal gRPC answers at HOST:PORT."""
    request = pb.GetKvRequest()
    return ask(address, lambda stub: stub.GetKv, request, access, timeout_s=KV_ANSWER_S)


def of_routers(addresses: Sequence[str], access: Access) -> pb.GetKvResponse:
    """The answer of the first router. The tenants of requests come from all routers, because each
    knows only its own requests. Raises ConfigError when no router answers."""
    found: list[pb.GetKvResponse] = []
    errors: list[ConfigError] = []
    for address in addresses:
        try:
            found.append(kv_of_router(address, access))
        except ConfigError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    _add_tenants(found[0], found[1:])
    return found[0]


def _add_tenants(found: pb.GetKvResponse, others: Iterable[pb.GetKvResponse]) -> None:
    tenants = {
        held.request_id: held.tenant
        for other in others
        for worker in other.workers
        for held in worker.held
        if held.tenant
    }
    for held in (held for worker in found.workers for held in worker.held):
        held.tenant = held.tenant or tenants.get(held.request_id, "")


def as_facts(found: pb.GetKvResponse) -> dict[str, object]:
    """In the format of `/debug/kv`."""
    return MessageToDict(
        found, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def print_tables(found: pb.GetKvResponse, *, tenant: str | None = None) -> None:
    """Prints blocks by tier and state, then everything held or cached, with holder, tenant and age.
    With `tenant`, only what belongs to that tenant."""
    console = Console(soft_wrap=True, width=WIDTH)
    tiers = [_device_row(worker) for worker in found.workers]
    tiers += [row for node in found.pool_nodes for row in _tier_rows(node)]
    held = [row for worker in found.workers for row in _held_rows(worker)]
    held += [row for node in found.pool_nodes for row in _held_for_workers(node)]
    if tenant is not None:
        held = [row for row in held if row.tenant == tenant_label(tenant)]
    console.print(_kv_table(TierRow, tiers))
    if held:
        console.print()
        console.print(_kv_table(HeldRow, held))
    for silent in found.silent:
        console.print(f"{silent.address} does not answer: {silent.error}")


def _device_row(worker: DebugKvResponse) -> TierRow:
    states = {"leased": worker.leased_blocks, "active": worker.active_blocks}
    return TierRow(
        where=worker.worker,
        tier="device",
        blocks=worker.total_blocks,
        free=worker.free_blocks,
        cached=worker.cached_blocks,
        other=_nonzero(states.items()),
        orphaned=worker.orphaned_blocks,
    )


def _tier_rows(node: PoolReport) -> Iterator[TierRow]:
    for tier in node.tiers:
        yield _tier_row(node, tier)


def _tier_row(node: PoolReport, tier: Tier) -> TierRow:
    states = {state.state: state.blocks for state in tier.states}
    free, cached = states.pop("free", 0), states.pop("cached", 0)
    if tier.tier == "host":
        states["to be written to disk"] = node.disk_waiting
    return TierRow(
        where=node.name,
        tier=tier.tier,
        blocks=tier.total_blocks,
        free=free,
        cached=cached,
        other=_nonzero(states.items()),
        orphaned=node.orphaned_blocks if tier.tier == "host" else "-",
    )


def _nonzero(states: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{blocks} {state}" for state, blocks in states if blocks) or "-"


def _held_rows(worker: DebugKvResponse) -> Iterator[HeldRow]:
    for held in worker.held:
        yield HeldRow(
            where=worker.worker,
            tier="device",
            state=held.state,
            holder=held.holder,
            tenant=held.tenant or "-",
            count=f"{len(held.block_ids)} blocks",
            age=_age(held.age_s),
        )
    yield from _cached_rows(worker.worker, "device", worker.cached)
    for slab in worker.slabs:
        yield HeldRow(
            where=worker.worker,
            tier="device",
            state=slab.state,
            holder=slab.holder,
            tenant="-",
            count=f"slab {slab.slab_id}",
            age=_age(slab.age_s),
        )


def _held_for_workers(node: PoolReport) -> Iterator[HeldRow]:
    for held in node.held:
        yield HeldRow(
            where=node.name,
            tier="host",
            state=held.state,
            holder=held.worker,
            tenant="-",
            count=f"{held.blocks} blocks",
            age=_age(held.age_s),
        )
    for tier in node.tiers:
        yield from _cached_rows(node.name, tier.tier, tier.cached)


def _cached_rows(where: str, tier: str, cached: Iterable[CachedBlocks]) -> Iterator[HeldRow]:
    for of_tenant in cached:
        yield HeldRow(
            where=where,
            tier=tier,
            state="cached",
            holder="-",
            tenant=of_tenant.tenant or "-",
            count=f"{of_tenant.blocks} blocks",
            age=_ages(of_tenant.newest_s, of_tenant.oldest_s),
        )


def _age(seconds: float) -> str:
    return f"{seconds:.1f} s"


def _ages(newest_s: float, oldest_s: float) -> str:
    newest, oldest = _age(newest_s), _age(oldest_s)
    return oldest if newest == oldest else f"{newest} to {oldest}"


def _kv_table(kind: type[TierRow] | type[HeldRow], rows: Sequence[TierRow | HeldRow]) -> Table:
    table = Table(*(field.name for field in fields(kind)), box=None)
    for row in rows:
        table.add_row(*map(str, astuple(row)))
    return table
