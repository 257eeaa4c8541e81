"""Puts a worker together from its settings: engine, core, links, threads."""

from __future__ import annotations

import logging
import queue
import time
from contextlib import ExitStack
from dataclasses import dataclass
from uuid import uuid4

from cluster.core.settings import WorkerSettings
from cluster.core.worker.build import build_worker_core
from cluster.core.worker.watchdog import StepWatch
from cluster.process.host_cpus import Pinned, pin, ranges
from cluster.process.trace import NO_TRACE, Trace, open_trace
from cluster.worker.build_engine import (
    UNMAPPED,
    FindCheckpoint,
    block_names,
    codec_offer,
    endpoint_options,
    open_engine,
    step_times,
)
from cluster.worker.device import AheadDevice, TracedEngine, WorkerDevice
from cluster.worker.events import Crashed, Incoming
from cluster.worker.last_words import LastWords
from cluster.worker.loop import WorkerLoop
from cluster.worker.mover import Mover
from cluster.worker.peers import PeerLinks
from cluster.worker.pool.links import PoolLinks
from cluster.worker.watchdog import Watchdog
from engine.core.activity import ReportActivity, unheard
from engine.core.step_times import LinearTimes, StepTimes
from engine.device.clock import clock
from engine.device.first_use import FIRST_USES
from engine.device.threads import nvtx, use_threads
from engine.runner import Engine
from kvpool.core.layout.block_names import BlockNames
from kvpool.core.transfer.codec_choice import CodecOffer
from kvpool.core.transfer.messages import HandoffMode, PeerHello
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.slabs import Staging, plan_staging
from kvpool.memory.probe import measure_copies
from kvpool.transport.link_kind import LinkKind
from kvrelay.messages import WorkerHello
from kvrelay.types import WIRE_VERSION, Incarnation, MemoryPart, Role

log = logging.getLogger(__name__)


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
        copies=measure_copies(engine.memory, staging.payload_bytes),
        crashed=lambda error: inbox.put(Crashed(error)),
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
    watchdog: Watchdog
    links: PeerLinks
    mover: Mover
    pools: PoolLinks | None
    hello: WorkerHello
    opened: ExitStack

    def close(self) -> None:
        self.opened.close()


def build_worker(
    settings: WorkerSettings,
    inbox: queue.SimpleQueue[Incoming],
    report: ReportActivity = unheard,
    words: LastWords | None = None,
    find: FindCheckpoint | None = None,
) -> WorkerParts:
    """Loads the model, which takes seconds; `settings` name the device and the transports. `find`:
    its checkpoint, where there is more than this host and the hub. Raises ModelError or
    ConfigError, with all closed."""
    with ExitStack() as opened:
        pinned = _pinned(settings)
        opened.callback(pinned.release)
        if settings.threads_per_rank is not None:
            use_threads(settings.threads_per_rank)
        device = settings.device
        trace = open_trace(settings.trace_dir, settings.name, nvtx(device), clock(device))
        opened.callback(trace.close)
        engine = open_engine(settings, report, find)
        opened.callback(engine.close)
        return _build_around(engine, settings, inbox, trace, pinned, opened, report, words)


def _build_around(
    engine: Engine,
    settings: WorkerSettings,
    inbox: queue.SimpleQueue[Incoming],
    trace: Trace,
    pinned: Pinned,
    opened: ExitStack,
    report: ReportActivity,
    words: LastWords | None,
) -> WorkerParts:
    engine.watch(lambda error: inbox.put(Crashed(error)))
    staging = _staging(settings, engine)
    offer = codec_offer(settings, engine, staging.payload_bytes)
    links = open_links(settings, engine, staging, offer, inbox)
    opened.callback(links.close)
    mover = open_mover(engine, staging, links, inbox, trace)
    opened.callback(mover.close)
    launches_ahead = _launches_ahead(settings, engine)
    times = step_times(settings, engine, report)
    core = build_worker_core(
        settings,
        engine.layout,
        engine.memory.blocks,
        block_names(settings, engine),
        times,
        staging,
        {slab: region.name for slab, region in mover.regions.items()},
        max_model_len=engine.facts.max_model_len,
        offer=offer,
        ranks=engine.memory.map.ranks,
        launches_ahead=launches_ahead,
        prompt_steps=max(1 + launches_ahead, engine.stages),
    )
    watchdog = _watchdog(settings, core.pace, words)
    opened.callback(watchdog.close)  # when the last step has ended
    stepping = engine if trace is NO_TRACE else TracedEngine(engine, trace, engine.stream)
    kind = AheadDevice if launches_ahead or engine.stages > 1 else WorkerDevice
    watchers = [watchdog.watch] if words is None else [watchdog.watch, words.notes]
    device = kind(stepping, settings.threads_per_rank, inbox.put, *watchers)
    opened.callback(device.close)
    pools = _pools(settings, engine, links, inbox)
    if pools is not None:
        opened.callback(pools.close)
    loop = WorkerLoop(
        core,
        device,
        links,
        mover,
        pools,
        inbox,
        trace=trace,
        prepare_grammar=engine.grammars.prepare,
    )
    watchdog.start()
    device.start()
    log.info("%s on %s: %s", settings.role, engine.facts.device, engine.sizing.reason)
    log.info("%s, over %s", staging.reason, ", ".join(links.endpoints.schemes))
    return WorkerParts(
        loop=loop,
        engine=engine,
        device=device,
        watchdog=watchdog,
        links=links,
        mover=mover,
        pools=pools,
        hello=_hello(settings, engine, links, core.tables.names, times, pinned, words),
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


def _watchdog(settings: WorkerSettings, times: StepTimes, words: LastWords | None) -> Watchdog:
    FIRST_USES.listen()
    guessed = settings.profile == "off"
    watch = StepWatch(times, time.monotonic(), guessed=guessed)
    if words is None:
        return Watchdog(watch, lambda: FIRST_USES.now)
    return Watchdog(watch, lambda: FIRST_USES.now, note=words.hung)


def _launches_ahead(settings: WorkerSettings, engine: Engine) -> bool:
    """On a CPU there is nothing to hide, and who joins waits a step longer."""
    if settings.launch_ahead == "auto":
        return engine.model.device.type == "cuda" and engine.can_follow
    if settings.launch_ahead == "on" and not engine.can_follow:
        log.warning("engine.launch_ahead: on: not with several stages or LongRoPE")
    return settings.launch_ahead == "on" and engine.can_follow


def _pinned(settings: WorkerSettings) -> Pinned:
    if settings.cpu_pinning == "off" or settings.device != "cpu" or settings.cpu_threads is None:
        return Pinned({})
    return pin(settings.cpu_threads)


def _pools(
    settings: WorkerSettings,
    engine: Engine,
    links: PeerLinks,
    inbox: queue.SimpleQueue[Incoming],
) -> PoolLinks | None:
    if settings.pool_address is None:
        return None
    pools = PoolLinks(
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
    pools.start()
    return pools


def _hello(
    settings: WorkerSettings,
    engine: Engine,
    links: PeerLinks,
    names: BlockNames,
    times: LinearTimes,
    pinned: Pinned,
    words: LastWords | None,
) -> WorkerHello:
    facts = engine.facts
    return WorkerHello(
        name=settings.name,
        pool=settings.pool,
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
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        mixed_chunk_tokens=settings.chunk_tokens(Role.DECODE),
        vocab_size=facts.vocab_size,
        physical_format=names.physical_format,
        rope_border_tokens=names.rope_border_tokens,
        step_times=times,
        kv_token_bytes=engine.layout.bytes_per_block // engine.layout.block_size,
        handoff_by_pool=settings.handoff == HandoffMode.POOL,
        takes=settings.takes,
        memory=_memory(engine),
        witness="" if words is None else words.address,
        witness_key="" if words is None else words.key,
    )


def _memory(engine: Engine) -> tuple[MemoryPart, ...]:
    account = engine.sizing.account.items()
    return tuple(MemoryPart(part=name, nbytes=nbytes) for name, nbytes in account if nbytes)
