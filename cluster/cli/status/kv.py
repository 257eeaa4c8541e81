"""`kvrelay status --kv`: who holds which KV, as tables or JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

from cluster.cli.status.asked import Facts
from cluster.cli.status.tables import WIDTH
from cluster.process.admin import ask
from kvpool.core.layout.hashes import tenant_label
from kvrelay.access.values import Access
from kvrelay.errors import ConfigError
from kvrelay.v1 import admin_pb2 as pb
from kvrelay.v1.pool_node_pb2 import CachedBlocks, PoolReport
from kvrelay.v1.pool_node_pb2 import TierBlocks as Tier
from kvrelay.v1.worker_pb2 import DebugKvResponse

ANSWER_S = 40.0


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


def of_router(address: str, access: Access) -> pb.GetKvResponse:
    """Raises ConfigError when no router's internal gRPC answers at HOST:PORT."""
    request = pb.GetKvRequest()
    return ask(address, lambda stub: stub.GetKv, request, access, timeout_s=ANSWER_S)


def of_routers(addresses: Sequence[str], access: Access) -> pb.GetKvResponse:
    """The answer of the first router. The tenants of requests come from all routers, because each
    knows only its own requests. Raises ConfigError when no router answers."""
    found: list[pb.GetKvResponse] = []
    errors: list[ConfigError] = []
    for address in addresses:
        try:
            found.append(of_router(address, access))
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


def as_facts(found: pb.GetKvResponse) -> Facts:
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
    console.print(_table(TierRow, tiers))
    if held:
        console.print()
        console.print(_table(HeldRow, held))
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


def _table(kind: type[TierRow] | type[HeldRow], rows: Sequence[TierRow | HeldRow]) -> Table:
    table = Table(*(field.name for field in fields(kind)), box=None)
    for row in rows:
        table.add_row(*map(str, astuple(row)))
    return table
