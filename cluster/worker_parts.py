"""Puts a worker together from its settings: engine, blocks, schedulers, links, threads."""

from __future__ import annotations

import logging
import queue
from dataclasses import dataclass
from uuid import uuid4

from cluster.device import Device
from cluster.mover import Mover
from cluster.peers import PeerLinks
from cluster.pool_side import PoolSide
from cluster.pool_turns import PoolTurns
from cluster.settings import WorkerSettings
from cluster.trace import NO_TRACE, Trace, open_trace
from cluster.traced_engine import TracedEngine
from cluster.worker_caches import open_caches
from cluster.worker_events import Crashed, Incoming
from cluster.worker_formats import block_names, codec_offer
from cluster.worker_loop import WorkerLoop
from decode_worker.batch import Batch
from decode_worker.receiver import Receiver
from decode_worker.scheduler import DecodeScheduler
from engine.canary import canary_bound
from engine.checkpoint import open_checkpoint
from engine.load import load_engine
from engine.nvtx import nvtx
from engine.runner import Engine
from engine.sizing import EngineLimits
from engine.threads import use_threads
from kvpool.block_names import BlockNames
from kvpool.codec import Codec
from kvpool.codec_choice import CodecOffer
from kvpool.handoff import HandoffMode, PeerHello
from kvpool.leases import LeaseTable
from kvpool.memory_probe import measure_copies
from kvpool.openings import Openings
from kvpool.pool_map import KvFacts
from kvpool.slabs import SlabPool
from kvpool.staging import Staging, plan_staging
from kvpool.tables import BlockTables
from kvpool.transport import memfd
from kvpool.transport.endpoints import EndpointOptions
from kvpool.transport.fabric import LinkKind
from kvpool.transport.ucx_options import UcxOptions
from kvrelay.messages import WorkerHello
from kvrelay.types import WIRE_VERSION, Incarnation
from prefill_worker.scheduler import PrefillScheduler

log = logging.getLogger(__name__)

UNMAPPED = ("nixl", "ucx")
"""Transports that send from memory of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """A worker that is ready to run its loop; `close` ends its other threads."""

    loop: WorkerLoop
    device: Device
    links: PeerLinks
    mover: Mover
    hello: WorkerHello
    tables: BlockTables
    pool: PoolTurns | None
    trace: Trace

    def close(self) -> None:
        self.device.close()
        if self.pool is not None:
            self.pool.close()
        self.mover.close()
        self.links.close()
        self.trace.close()


def build_worker(settings: WorkerSettings, inbox: queue.SimpleQueue[Incoming]) -> WorkerParts:
    """Loads the model, which takes seconds. Raises ModelError or ConfigError."""
    if settings.cpu_threads is not None:
        use_threads(settings.cpu_threads)
    trace = open_trace(settings.trace_dir, settings.name, nvtx(settings.device))
    engine = _load(settings)
    tables = _tables(settings, engine)
    staging = plan_staging(
        engine.layout,
        slabs=settings.staging_slabs,
        chunk_tokens=settings.prefill_chunk_tokens,
        total_bytes=settings.staging_bytes,
        on_cpu=engine.memory.device.type == "cpu",
    )
    offer = codec_offer(settings, engine)
    links = _links(settings, engine, staging, offer, inbox)
    mover = _mover(engine, staging, links, inbox, trace)
    stepping = engine if trace is NO_TRACE else TracedEngine(engine, trace)
    device = Device(stepping, settings.cpu_threads, inbox.put)
    openings = open_caches(settings, tables, staging)
    bound = _canary_bound(settings, engine)
    prefill = PrefillScheduler(
        openings=openings,
        chunk_tokens=settings.prefill_chunk_tokens,
        mode=HandoffMode(settings.handoff),
        canary_every=settings.canary_every if bound is not None else 0,
    )
    decode = _decode_scheduler(settings, engine, staging, offer, openings, mover, bound)
    max_model_len = engine.facts.max_model_len
    loop = WorkerLoop(
        device, openings, prefill, decode, inbox, max_model_len=max_model_len, trace=trace
    )
    pool = _pool(settings, engine, openings, links, inbox)
    loop.attach(links, mover, pool)
    mover.start()
    device.start()
    log.info("%s on %s: %s", settings.role, engine.facts.device, engine.sizing.reason)
    log.info("%s, over %s", staging.reason, ", ".join(links.endpoints.schemes))
    return WorkerParts(
        loop=loop,
        device=device,
        links=links,
        mover=mover,
        hello=_hello(settings, engine, links, tables.names),
        tables=tables,
        pool=pool,
        trace=trace,
    )


def _canary_bound(settings: WorkerSettings, engine: Engine) -> float | None:
    if settings.canary_every == 0:
        return None
    if settings.codec != Codec.NONE or settings.allow_mixed_precision:
        log.warning("transfer.canary_every: no KV is checked, as it may change on its way")
        return None
    bound = canary_bound(engine)
    if bound is None:
        log.warning(
            "transfer.canary_every: no KV is checked, experts vary in %s", engine.facts.dtype
        )
    else:
        log.info("canary: logits may differ by %.2g of their spread", bound)
    return bound


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
        wants_changes=settings.prefix_caching,
        post=inbox.put,
        crashed=lambda error: inbox.put(Crashed(error)),
        host=settings.host,
    )
    side.start()
    confirms = settings.handoff == HandoffMode.POOL
    return PoolTurns(side, openings, confirms=confirms)


def _tables(settings: WorkerSettings, engine: Engine) -> BlockTables:
    return BlockTables(
        engine.layout,
        engine.memory.blocks,
        names=block_names(settings, engine),
        caching=settings.prefix_caching,
        policy=settings.eviction,
    )


def _load(settings: WorkerSettings) -> Engine:
    limits = EngineLimits(
        max_model_len=settings.max_model_len,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        max_running_requests=settings.max_running_requests,
        memory_fraction=settings.memory_fraction,
        kv_memory_bytes=settings.kv_memory_bytes,
        share=settings.device_share,
        staging_slabs=settings.staging_slabs,
        staging_bytes=settings.staging_bytes,
        sending_slabs=int(any(scheme in UNMAPPED for scheme in settings.transports)),
    )
    return load_engine(
        open_checkpoint(settings.model, settings.revision),
        device=settings.device,
        dtype=settings.dtype,
        block_size=settings.block_size,
        blocks=None,
        limits=limits,
        allocate=memfd.allocate if _shares_memory(settings) else None,
    )


def _endpoint_options(settings: WorkerSettings) -> EndpointOptions:
    return EndpointOptions(
        host=settings.host,
        port_range=settings.port_range,
        secret=settings.secret.encode(),
        ucx=UcxOptions(**dict(settings.ucx)),  # type: ignore[arg-type]
        device=settings.device,
    )


def _shares_memory(settings: WorkerSettings) -> bool:
    """Whether peers may map the pool itself."""
    return settings.device == "cpu" and "shm" in settings.transports


def _links(
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
        ),
        name=settings.name,
    )
    return PeerLinks(
        settings.transports,
        hello,
        inbox.put,
        options=_endpoint_options(settings),
        require=[LinkKind(kind) for kind in settings.require],
        memory=engine.memory,
        copies=measure_copies(engine.layout, engine.memory.device),
    )


def _mover(
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


def _decode_scheduler(
    settings: WorkerSettings,
    engine: Engine,
    staging: Staging,
    offer: CodecOffer,
    openings: Openings,
    mover: Mover,
    canary_bound: float | None,
) -> DecodeScheduler:
    receiver = Receiver(
        tables=openings.tables,
        slabs=SlabPool(staging.payload_bytes, staging.slabs),
        regions={slab: region.name for slab, region in mover.regions.items()},
        leases=LeaseTable(settings.lease_ttl_s),
        mode=HandoffMode(settings.handoff),
        canary_every=settings.canary_every if canary_bound is not None else 0,
    )
    receiver.pools.offer = offer
    longrope = engine.model.longrope
    batch = Batch(
        openings=openings,
        chunk_tokens=settings.prefill_chunk_tokens,
        rope_border_tokens=longrope.border_tokens if longrope is not None else None,
    )
    return DecodeScheduler(
        receiver=receiver,
        batch=batch,
        max_running=settings.max_running_requests,
        canary_bound=canary_bound,
    )


def _hello(
    settings: WorkerSettings, engine: Engine, links: PeerLinks, names: BlockNames
) -> WorkerHello:
    facts = engine.facts
    return WorkerHello(
        name=settings.name,
        incarnation=links.incarnation,
        role=settings.role,
        device=facts.device,
        transport=",".join(links.endpoints.schemes),
        transfer_addresses=links.endpoints.addresses,
        fingerprint=facts.fingerprint,
        architecture=facts.architecture,
        block_size=engine.layout.block_size,
        total_blocks=engine.memory.blocks,
        max_model_len=facts.max_model_len,
        max_running_requests=settings.max_running_requests,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        vocab_size=facts.vocab_size,
        physical_format=names.physical_format,
        rope_border_tokens=names.rope_border_tokens,
    )
