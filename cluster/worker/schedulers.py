"""A worker's two schedulers, over the same blocks."""

from __future__ import annotations

from cluster.settings import WorkerSettings
from cluster.worker.mover import Mover
from cluster.worker.qos import prefill_order, standing
from decode_worker.batch import Batch
from decode_worker.receiver import Receiver
from decode_worker.scheduler import DecodeScheduler
from engine.latency import StepTimes
from engine.runner import Engine
from kvpool.codec_choice import CodecOffer
from kvpool.handoff import HandoffMode
from kvpool.leases import LeaseTable
from kvpool.openings import Openings
from kvpool.slabs import SlabPool
from kvpool.staging import Staging
from prefill_worker.scheduler import PrefillScheduler


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
    receiver = Receiver(
        tables=openings.tables,
        slabs=SlabPool(staging.payload_bytes, staging.slabs),
        regions={slab: region.name for slab, region in mover.regions.items()},
        leases=LeaseTable(settings.lease_ttl_s),
        mode=HandoffMode(settings.handoff),
    )
    receiver.pools.offer = offer
    receiver.pools.ranks = engine.memory.map.ranks
    longrope = engine.model.longrope
    batch = Batch(
        openings=openings,
        chunk_tokens=settings.own_chunk_tokens,
        standing=standing(settings),
        times=times,
        rope_border_tokens=longrope.border_tokens if longrope is not None else None,
    )
    return DecodeScheduler(
        receiver=receiver,
        batch=batch,
    )
