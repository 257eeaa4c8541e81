"""Puts a worker together from its settings: engine, blocks, schedulers, links, threads.

A worker's two schedulers, over the same blocks.

What a worker does to have a prompt's KV without computing it, as its settings want it.

A worker's links to its peers, and the thread that moves KV over them.
"""

from __future__ import annotations

import logging
import queue
from contextlib import ExitStack
from dataclasses import dataclass
from uuid import uuid4

from cluster.core.qos import prefill_order, tier_shares
from cluster.core.settings import WorkerSettings
from cluster.process.host_cpus import Pinned, pin, ranges
from cluster.process.trace import NO_TRACE, Trace, open_trace
from cluster.worker.build_engine import UNMAPPED, codec_offer, open_engine, open_tables, step_times
from cluster.worker.device import AheadDevice, TracedEngine, WorkerDevice
from cluster.worker.events import Crashed, Incoming
from cluster.worker.loop import WorkerLoop
from cluster.worker.mover import Mover
from cluster.worker.peers import PeerLinks
from cluster.worker.pool.side import PoolSide
from cluster.worker.pool.turns import PoolTurns
from decode_worker.batch import Batch
from decode_worker.reservations import Reservations
from decode_worker.scheduler import DecodeScheduler
from engine.core.activity import Report, unheard
from engine.core.correction import StepPace
from engine.core.step_times import LinearTimes, StepTimes
from engine.device.threads import nvtx, use_threads
from engine.runner import Engine
from kvpool.core.blocks.device_cache import BlockNews
from kvpool.core.blocks.leases import LeaseTable
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.cost import RestoreCost
from kvpool.core.fetch.openings import Openings
from kvpool.core.fetch.peer_pull import PullGrants, Pulls
from kvpool.core.fetch.pool_fetch import FarFetches, Restores
from kvpool.core.fetch.write_behind import WriteBehind
from kvpool.core.layout.block_names import BlockNames
from kvpool.core.transfer.codec_choice import CodecOffer
from kvpool.core.transfer.messages import HandoffMode, PeerHello
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.slabs import SlabPool, Staging, plan_staging
from kvpool.memory.probe import measure_copies
from kvpool.transport.endpoints import EndpointOptions
from kvpool.transport.link_kind import LinkKind
from kvpool.transport.rdma.ucx_options import UcxOptions
from kvrelay.messages import WorkerHello
from kvrelay.types import WIRE_VERSION, Incarnation
from prefill_worker.scheduler import PrefillScheduler

log = logging.getLogger(__name__)


def prefill_scheduler(
    settings: WorkerSettings, openings: Openings, times: StepTimes
) -> PrefillScheduler:
    return PrefillScheduler(
        openings=openings,
        chunk_tokens=settings.prefill_chunk_tokens,
        mode=HandoffMode(settings.handoff),
        canary_every=settings.canary_every,
        order=prefill_order(settings, times),
    )


def decode_scheduler(
    settings: WorkerSettings,
    engine: Engine,
    staging: Staging,
    offer: CodecOffer,
    openings: Openings,
    mover: Mover,
    times: StepTimes,
) -> DecodeScheduler:
    reservations = Reservations(
        tables=openings.tables,
        slabs=SlabPool(staging.payload_bytes, staging.slabs),
        regions={slab: region.name for slab, region in mover.regions.items()},
        leases=LeaseTable(settings.lease_ttl_s),
        mode=HandoffMode(settings.handoff),
        offer=offer,
        ranks=engine.memory.map.ranks,
    )
    longrope = engine.model.longrope
    batch = Batch(
        openings=openings,
        chunk_tokens=settings.own_chunk_tokens,
        shares=tier_shares(settings),
        times=times,
        rope_border_tokens=longrope.border_tokens if longrope is not None else None,
    )
    return DecodeScheduler(
        reservations=reservations,
        batch=batch,
    )


def open_caches(settings: WorkerSettings, tables: BlockTables, staging: Staging) -> Openings:
    """Without prefix caching nothing is shared with other workers."""
    openings = Openings(tables=tables)
    cost = RestoreCost(tables.layout.block_size)
    if settings.pool_address is not None:
        tables.cache.reports = True
        openings.restores = Restores(tables=tables, cost=cost)
        openings.write_behind = WriteBehind(tables)
        openings.far = FarFetches(tables=tables, cost=cost)
    if settings.prefix_caching:
        tables.cache.changes = BlockNews()
        openings.pulls = Pulls(tables=tables, cost=cost, read_bytes=staging.payload_bytes)
        leases = LeaseTable[tuple[Incarnation, int]](settings.lease_ttl_s)
        openings.grants = PullGrants(tables=tables, leases=leases)
    return openings


def open_links(
    settings: WorkerSettings,
    engine: Engine,
    staging: Staging,
    offer: CodecOffer,
    inbox: queue.SimpleQueue[Incoming],
) -> PeerLinks:
    hello = PeerHello(
        wire_version=WIRE_VERSION,
        incarnation=Incarnation(uuid4().hex),
        fingerprint=engine.facts.fingerprint,
        kv=KvFacts(
            dtype=engine.layout.dtype,
            block_size=engine.layout.block_size,
            blocks=engine.memory.blocks,
            slab_bytes=staging.payload_bytes,
            offer=offer,
            mixed_precision=settings.allow_mixed_precision,
            ranks=engine.memory.map.ranks,
        ),
        name=settings.name,
    )
    return PeerLinks(
        settings.transports,
        hello,
        inbox.put,
        options=endpoint_options(settings),
        require=[LinkKind(kind) for kind in settings.require],
        memory=None if engine.memory.lies_apart else engine.memory,
        copies=measure_copies(
            engine.layout, engine.memory.device, staging.payload_bytes, engine.memory.map.ranks
        ),
    )


def endpoint_options(settings: WorkerSettings) -> EndpointOptions:
    return EndpointOptions(
        host=settings.host,
        port_range=settings.port_range,
        secret=settings.secret.encode(),
        ucx=UcxOptions(**dict(settings.ucx)),  # type: ignore[arg-type]
        device=settings.device,
    )


def open_mover(
    engine: Engine,
    staging: Staging,
    links: PeerLinks,
    inbox: queue.SimpleQueue[Incoming],
    trace: Trace,
) -> Mover:
    return Mover(
        engine.memory,
        links,
        engine.facts.fingerprint,
        slabs=staging.slabs,
        slab_bytes=staging.slab_bytes,
        post=inbox.put,
        crashed=lambda error: inbox.put(Crashed(error)),
        trace=trace,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """A worker that is ready to run its loop; `close` ends its other threads."""

    loop: WorkerLoop
    engine: Engine
    device: WorkerDevice
    links: PeerLinks
    mover: Mover
    hello: WorkerHello
    tables: BlockTables
    pool: PoolTurns | None
    opened: ExitStack

    def close(self) -> None:
        self.opened.close()


def build_worker(
    settings: WorkerSettings, inbox: queue.SimpleQueue[Incoming], report: Report = unheard
) -> WorkerParts:
    """Loads the model, which takes seconds; `settings` name the device and the transports. Raises
    ModelError or ConfigError, with all closed."""
    with ExitStack() as opened:
        pinned = _pinned(settings)
        opened.callback(pinned.release)
        if settings.threads_per_rank is not None:
            use_threads(settings.threads_per_rank)
        trace = open_trace(settings.trace_dir, settings.name, nvtx(settings.device))
        opened.callback(trace.close)
        engine = open_engine(settings, report)
        opened.callback(engine.close)
        return _build_around(engine, settings, inbox, trace, pinned, opened, report)


def _build_around(
    engine: Engine,
    settings: WorkerSettings,
    inbox: queue.SimpleQueue[Incoming],
    trace: Trace,
    pinned: Pinned,
    opened: ExitStack,
    report: Report,
) -> WorkerParts:
    engine.watch(lambda error: inbox.put(Crashed(error)))
    tables = open_tables(settings, engine)
    staging = _staging(settings, engine)
    offer = codec_offer(settings, engine, staging.payload_bytes)
    links = open_links(settings, engine, staging, offer, inbox)
    opened.callback(links.close)
    mover = open_mover(engine, staging, links, inbox, trace)
    opened.callback(mover.close)
    device = _device(settings, engine, inbox, trace)
    opened.callback(device.close)
    openings = open_caches(settings, tables, staging)
    times = step_times(settings, engine, report)
    pace = StepPace(times)
    loop = WorkerLoop(
        device,
        openings,
        prefill_scheduler(settings, openings, pace),
        decode_scheduler(settings, engine, staging, offer, openings, mover, pace),
        inbox,
        max_model_len=engine.facts.max_model_len,
        pace=pace,
        launches_ahead=isinstance(device, AheadDevice),
        trace=trace,
    )
    pool = _pool(settings, engine, openings, links, inbox)
    if pool is not None:
        opened.callback(pool.close)
    loop.attach(links, mover, pool)
    mover.start()
    device.start()
    log.info("%s on %s: %s", settings.role, engine.facts.device, engine.sizing.reason)
    log.info("%s, over %s", staging.reason, ", ".join(links.endpoints.schemes))
    return WorkerParts(
        loop=loop,
        engine=engine,
        device=device,
        links=links,
        mover=mover,
        hello=_hello(settings, engine, links, tables.names, times, pinned),
        tables=tables,
        pool=pool,
        opened=opened.pop_all(),
    )


def _staging(settings: WorkerSettings, engine: Engine) -> Staging:
    return plan_staging(
        engine.layout,
        slabs=settings.staging_slabs,
        chunk_tokens=settings.prefill_chunk_tokens,
        total_bytes=settings.staging_bytes,
        on_cpu=engine.memory.device.type == "cpu",
    )


def _device(
    settings: WorkerSettings,
    engine: Engine,
    inbox: queue.SimpleQueue[Incoming],
    trace: Trace,
) -> WorkerDevice:
    stepping = engine if trace is NO_TRACE else TracedEngine(engine, trace)
    kind = AheadDevice if _launches_ahead(settings, engine) else WorkerDevice
    return kind(stepping, settings.threads_per_rank, inbox.put)


def _launches_ahead(settings: WorkerSettings, engine: Engine) -> bool:
    """On a CPU there is nothing to hide, and who joins waits a step longer."""
    if settings.launch_ahead == "auto":
        return engine.model.device.type == "cuda" and engine.can_follow
    if settings.launch_ahead == "on" and not engine.can_follow:
        log.warning("engine.launch_ahead: on: not with several ranks or LongRoPE")
    return settings.launch_ahead == "on" and engine.can_follow


def _pinned(settings: WorkerSettings) -> Pinned:
    if settings.cpu_pinning == "off" or settings.device != "cpu" or settings.cpu_threads is None:
        return Pinned({})
    return pin(settings.cpu_threads)


def _pool(
    settings: WorkerSettings,
    engine: Engine,
    openings: Openings,
    links: PeerLinks,
    inbox: queue.SimpleQueue[Incoming],
) -> PoolTurns | None:
    if settings.pool_address is None:
        return None
    side = PoolSide(
        engine.memory,
        address=settings.pool_address,
        incarnation=links.incarnation,
        fingerprint=engine.facts.fingerprint,
        looks_up=settings.prefix_caching,
        post=inbox.put,
        crashed=lambda error: inbox.put(Crashed(error)),
        far_transports=[scheme for scheme in settings.transports if scheme in UNMAPPED],
        options=endpoint_options(settings),
        require=[LinkKind(kind) for kind in settings.require],
    )
    side.start()
    confirms = settings.handoff == HandoffMode.POOL
    return PoolTurns(side, openings, confirms=confirms)


def _hello(
    settings: WorkerSettings,
    engine: Engine,
    links: PeerLinks,
    names: BlockNames,
    times: LinearTimes,
    pinned: Pinned,
) -> WorkerHello:
    facts = engine.facts
    return WorkerHello(
        name=settings.name,
        incarnation=links.incarnation,
        role=settings.role,
        device=facts.device,
        cpus=ranges(pinned.cpus),
        transport=",".join(links.endpoints.schemes),
        transfer_addresses=links.endpoints.addresses,
        fingerprint=facts.fingerprint,
        architecture=facts.architecture,
        block_size=engine.layout.block_size,
        total_blocks=engine.memory.blocks,
        max_model_len=facts.max_model_len,
        max_running_requests=settings.max_running_requests,
        prefill_chunk_tokens=settings.own_chunk_tokens,
        vocab_size=facts.vocab_size,
        physical_format=names.physical_format,
        rope_border_tokens=names.rope_border_tokens,
        step_times=times,
        kv_token_bytes=engine.layout.bytes_per_block // engine.layout.block_size,
    )
