"""Every held block and slab of a worker, with holder and age: what `/debug/kv` shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain

from cluster.worker.block_reports import BlockReports
from decode_worker.receiver import Receiver
from kvpool.blocks import BlockState
from kvpool.pool.wire import cached_blocks
from kvpool.tables import BlockTables
from kvpool.tenants import TenantBlocks, most_of
from kvrelay.messages import WorkerHello
from kvrelay.v1 import worker_pb2 as pb


def kv_report(
    hello: WorkerHello,
    tables: BlockTables,
    receiver: Receiver,
    reports: BlockReports,
    now_s: float,
) -> pb.DebugKvResponse:
    counts = tables.counts()
    held = [
        pb.HeldBlocks(
            holder=str(entry.holder),
            state=entry.state.name.lower(),
            block_ids=list(chain.from_iterable(entry.tables)),
            age_s=now_s - entry.since_s,
            request_id=entry.holder.key.request_id,
        )
        for entry in tables.held()
    ]
    slabs = [
        pb.HeldSlab(slab_id=s.slab_id, state=s.state, holder=s.holder, age_s=s.age_s)
        for s in receiver.slabs.held(now_s)
    ]
    return pb.DebugKvResponse(
        worker=hello.name,
        incarnation=hello.incarnation,
        total_blocks=tables.blocks,
        free_blocks=counts[BlockState.FREE],
        leased_blocks=counts[BlockState.LEASED],
        active_blocks=counts[BlockState.ACTIVE],
        cached_blocks=counts[BlockState.CACHED],
        orphaned_blocks=tables.orphaned(),
        held=held,
        slabs=slabs,
        total_slabs=receiver.slabs.count,
        cached=map(cached_blocks, most_of(_cached(tables, reports, now_s))),
    )


def _cached(tables: BlockTables, reports: BlockReports, now_s: float) -> Iterator[TenantBlocks]:
    ages_s: defaultdict[str, list[float]] = defaultdict(list)
    for block in tables.cache.index:
        if not block.holders:
            ages_s[block.tenant].append(reports.age_s(block.hash, now_s))
    for tenant, ages in ages_s.items():
        yield TenantBlocks(tenant=tenant, blocks=len(ages), oldest_s=max(ages), newest_s=min(ages))
