"""Puts a worker together from its settings: engine, blocks, schedulers, links, threads."""

from __future__ import annotations

import logging
import queue
from contextlib import ExitStack
from dataclasses import dataclass

from cluster.device import AheadDevice, Device
from cluster.host_cpus import ranges
from cluster.peers import PeerLinks
from cluster.pinning import Pinned, pin
from cluster.pool.side import PoolSide
from cluster.pool.turns import PoolTurns
from cluster.settings import WorkerSettings
from cluster.trace import NO_TRACE, Trace, open_trace
from cluster.worker.caches import open_caches
from cluster.worker.engine import UNMAPPED, open_engine, open_tables
from cluster.worker.events import Crashed, Incoming
from cluster.worker.formats import codec_offer
from cluster.worker.links import endpoint_options, open_links, open_mover
from cluster.worker.loop import WorkerLoop
from cluster.worker.mover import Mover
from cluster.worker.schedulers import decode_scheduler, prefill_scheduler
from cluster.worker.times import step_times
from cluster.worker.traced_engine import TracedEngine
from engine.activity import Report, unheard
from engine.correction import StepPace
from engine.latency_fit import LinearTimes
from engine.nvtx import nvtx
from engine.runner import Engine
from engine.threads import use_threads
from kvpool.block_names import BlockNames
from kvpool.handoff import HandoffMode
from kvpool.openings import Openings
from kvpool.staging import Staging, plan_staging
from kvpool.tables import BlockTables
from kvpool.transport.fabric import LinkKind
from kvrelay.messages import WorkerHello

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """A worker that is ready to run its loop; `close` ends its other threads."""

    loop: WorkerLoop
    engine: Engine
    device: Device
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
) -> Device:
    stepping = engine if trace is NO_TRACE else TracedEngine(engine, trace)
    kind = AheadDevice if _launches_ahead(settings, engine) else Device
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
