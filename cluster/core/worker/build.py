"""Puts a worker's core together: the one assembly that production, simulator and tests use."""

from __future__ import annotations

from cluster.core.qos import prefill_order, tier_shares
from cluster.core.settings import WorkerSettings
from cluster.core.worker.core import WorkerCore
from decode_worker.batch import Batch
from decode_worker.reservations import Reservations
from decode_worker.scheduler import DecodeScheduler
from engine.core.correction import StepPace
from engine.core.step_times import StepTimes
from kvpool.core.blocks.leases import LeaseTable
from kvpool.core.blocks.news import RunNews
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.cost import RestoreCost
from kvpool.core.fetch.peer_pull import PeerSource, PullGrants
from kvpool.core.fetch.pool_stores import PoolStores
from kvpool.core.fetch.prefix_lookup import PoolUse, PrefixLookup
from kvpool.core.layout.block_names import BlockNames
from kvpool.core.layout.layout import KvLayout
from kvpool.core.transfer.codec_choice import NO_CODEC, CodecOffer
from kvpool.core.transfer.messages import HandoffMode
from kvpool.core.transfer.slabs import SlabId, SlabPool, Staging
from kvrelay.types import Incarnation
from prefill_worker.scheduler import PrefillScheduler


def build_worker_core(
    settings: WorkerSettings,
    layout: KvLayout,
    blocks: int,
    names: BlockNames,
    times: StepTimes,
    staging: Staging,
    regions: dict[SlabId, str],
    *,
    max_model_len: int,
    cost: RestoreCost | None = None,
    pool_stores: PoolStores | None = None,
    offer: CodecOffer = NO_CODEC,
    ranks: int = 1,
    most_steps: int = 1,
    launches_ahead: bool = False,
    prompt_steps: int = 1,
) -> WorkerCore:
    """`regions` names each staging slab's memory, as peers are told. `cost` says what is worth
    fetching; None: as it is measured. `pool_stores` None: with the usual limits. `ranks` share the
    heads of each block."""
    tables = BlockTables(
        layout, blocks, names=names, caching=settings.prefix_caching, policy=settings.eviction
    )
    cost = RestoreCost(layout.block_size) if cost is None else cost
    lookup = _lookup(settings, tables, staging, cost, pool_stores)
    pace = StepPace(times)
    reservations = Reservations(
        tables=tables,
        slabs=SlabPool(staging.payload_bytes, staging.slabs),
        regions=regions,
        leases=LeaseTable(settings.lease_ttl_s),
        mode=HandoffMode(settings.handoff),
        offer=offer,
        ranks=ranks,
    )
    return WorkerCore(
        lookup,
        _prefill(settings, lookup, pace),
        DecodeScheduler(reservations=reservations, batch=_batch(settings, lookup, pace)),
        pace,
        max_model_len=max_model_len,
        role=settings.role,
        chunk_tokens=settings.chunk_tokens,
        most_steps=most_steps,
        launches_ahead=launches_ahead,
        prompt_steps=prompt_steps,
    )


def _lookup(
    settings: WorkerSettings,
    tables: BlockTables,
    staging: Staging,
    cost: RestoreCost,
    stores: PoolStores | None,
) -> PrefixLookup:
    """Without prefix caching nothing is shared with other workers."""
    at_once = settings.handoff == HandoffMode.POOL
    has_pool, caching = settings.pool_address is not None, settings.prefix_caching
    if has_pool:
        tables.device.reports = True
    if caching:
        tables.device.changes = RunNews(tables.device.tree)
    leases = LeaseTable[tuple[Incarnation, int]](settings.lease_ttl_s)
    read_bytes = staging.payload_bytes
    return PrefixLookup(
        tables=tables,
        cost=cost,
        pool=PoolUse(tables, cost, stores, offers_at_once=at_once) if has_pool else None,
        peers=PeerSource(tables=tables, cost=cost, read_bytes=read_bytes) if caching else None,
        grants=PullGrants(tables=tables, leases=leases) if caching else None,
    )


def _prefill(settings: WorkerSettings, lookup: PrefixLookup, times: StepTimes) -> PrefillScheduler:
    return PrefillScheduler(
        lookup=lookup,
        chunk_tokens=settings.prefill_chunk_tokens,
        mode=HandoffMode(settings.handoff),
        canary_every=settings.canary_every,
        order=prefill_order(settings, times),
    )


def _batch(settings: WorkerSettings, lookup: PrefixLookup, times: StepTimes) -> Batch:
    return Batch(
        lookup=lookup,
        chunk_tokens=settings.chunk_tokens(settings.role),
        shares=tier_shares(settings),
        times=times,
        rope_border_tokens=lookup.tables.names.rope_border_tokens,
    )
