"""How a worker's KV is named, and what it may be encoded with on its way, by its settings."""

from __future__ import annotations

from cluster.settings import WorkerSettings
from engine.runner import Engine
from kvpool.block_names import BlockNames, named_format
from kvpool.codec import Codec
from kvpool.codec_choice import CodecOffer, CodecSpeed
from kvpool.memory.probe import measure_codecs


def block_names(settings: WorkerSettings, engine: Engine) -> BlockNames:
    longrope = engine.model.longrope
    return BlockNames(
        fingerprint=engine.facts.fingerprint,
        physical_format=named_format(
            engine.layout,
            codec=settings.codec,
            mixed_precision=settings.allow_mixed_precision,
        ),
        rope_border_tokens=longrope.border_tokens if longrope is not None else None,
    )


def codec_offer(settings: WorkerSettings, engine: Engine, slab_bytes: int) -> CodecOffer:
    """Measured, unless none is configured."""
    codecs = codecs_of(settings)
    pool = engine.memory
    speeds: tuple[CodecSpeed, ...] = ()
    if codecs:
        speeds = measure_codecs(pool.layout, pool.device, codecs, slab_bytes, pool.map.ranks)
    return CodecOffer(speeds=speeds, only_if_faster=settings.codec == "auto")


def codecs_of(settings: WorkerSettings) -> list[Codec]:
    """Those that may be used, but none."""
    if settings.codec == "auto":
        return [Codec.INT8, Codec.FP8]
    return [codec for codec in Codec if codec == settings.codec != Codec.NONE]
