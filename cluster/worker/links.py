"""A worker's links to its peers, and the thread that moves KV over them."""

from __future__ import annotations

import queue
from uuid import uuid4

from cluster.peers import PeerLinks
from cluster.settings import WorkerSettings
from cluster.trace import Trace
from cluster.worker.events import Crashed, Incoming
from cluster.worker.mover import Mover
from engine.runner import Engine
from kvpool.codec_choice import CodecOffer
from kvpool.handoff import PeerHello
from kvpool.memory.probe import measure_copies
from kvpool.pool.map import KvFacts
from kvpool.staging import Staging
from kvpool.transport.endpoints import EndpointOptions
from kvpool.transport.fabric import LinkKind
from kvpool.transport.ucx_options import UcxOptions
from kvrelay.types import WIRE_VERSION, Incarnation


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
