"""A worker's engine, and the block tables over its memory, as its settings ask for them."""

from __future__ import annotations

import logging

from cluster.settings import WorkerSettings
from cluster.worker.formats import block_names
from engine.activity import Report, unheard
from engine.checkpoint import open_checkpoint
from engine.load import load_engine
from engine.parallel.load import load_split
from engine.runner import Engine
from engine.sizing import EngineLimits
from kvpool.tables import BlockTables
from kvpool.transport import memfd

log = logging.getLogger(__name__)

UNMAPPED = ("nixl", "ucx")
"""Transports between hosts, which send from memory of their own."""


def open_engine(settings: WorkerSettings, report: Report = unheard) -> Engine:
    """Takes seconds. Raises ModelError."""
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
    checkpoint = open_checkpoint(settings.model, settings.revision, report)
    if settings.tensor > 1:
        return load_split(
            checkpoint,
            settings.tensor,
            threads=settings.threads_per_rank or 1,
            device=settings.device,
            dtype=settings.dtype,
            block_size=settings.block_size,
            blocks=None,
            limits=limits,
            attention=settings.attention,
            cuda=settings.cuda,
            compiled=settings.compile == "auto",
            timeout_s=settings.rank_timeout_s,
            report=report,
        )
    return load_engine(
        checkpoint,
        device=settings.device,
        dtype=settings.dtype,
        block_size=settings.block_size,
        blocks=None,
        limits=limits,
        allocate=memfd.allocate if _shares_memory(settings) else None,
        compiled=settings.compile == "auto",
        attention=settings.attention,
        cuda=settings.cuda,
        report=report,
    )


def _shares_memory(settings: WorkerSettings) -> bool:
    """Whether peers may map the pool itself."""
    return settings.device == "cpu" and "shm" in settings.transports


def open_tables(settings: WorkerSettings, engine: Engine) -> BlockTables:
    return BlockTables(
        engine.layout,
        engine.memory.blocks,
        names=block_names(settings, engine),
        caching=settings.prefix_caching,
        policy=settings.eviction,
    )
