"""A worker's engine, as its settings ask for it.

How a worker's KV is named, and what it may be encoded with on its way, by its settings.

A YAML file of step times, as `kvrelay status --format json` shows them for each worker.

How long a worker's steps take before it has served anyone: measured, read or guessed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from cluster.config.load import describe, read_yaml
from cluster.config.types import Section
from cluster.core.settings import WorkerSettings
from engine.core.activity import ReportActivity, Stage, StartActivity, unheard
from engine.core.sizing import EngineLimits
from engine.core.step_times import LinearTimes, decode_work, prefill_work
from engine.load import load_engine
from engine.load_ranks import load_split
from engine.model.checkpoint import Checkpoint, open_checkpoint
from engine.parallel.grid import Grid
from engine.runner import Engine
from engine.time_profile import guess_times, profile_times
from kvpool.core.layout.block_names import BlockNames, named_format
from kvpool.core.layout.codec import Codec
from kvpool.core.transfer.codec_choice import CodecOffer, CodecSpeed
from kvpool.memory.probe import measure_codecs
from kvpool.transport.endpoints import EndpointOptions
from kvpool.transport.mapped import memfd
from kvpool.transport.rdma.ucx_options import UcxOptions
from kvpool.transport.send_buffers import SEND_BUFFERS
from kvrelay.errors import ConfigError

log = logging.getLogger(__name__)


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
    speeds: tuple[CodecSpeed, ...] = ()
    if codecs:
        speeds = measure_codecs(engine.memory, codecs, slab_bytes)
    return CodecOffer(speeds=speeds, only_if_faster=settings.codec == "auto")


def codecs_of(settings: WorkerSettings) -> list[Codec]:
    """Those that may be used, but none."""
    if settings.codec == "auto":
        return [Codec.INT8, Codec.FP8]
    return [codec for codec in Codec if codec == settings.codec != Codec.NONE]


UNMAPPED = ("nixl", "ucx")
"""Transports between hosts, which send from memory of their own."""


def endpoint_options(settings: WorkerSettings) -> EndpointOptions:
    return EndpointOptions(
        host=settings.host,
        port_range=settings.port_range,
        secret=settings.access.token,
        ucx=UcxOptions(**dict(settings.ucx)),  # type: ignore[arg-type]
        device=settings.device,
    )


FindCheckpoint = Callable[[ReportActivity], Checkpoint]


def open_engine(
    settings: WorkerSettings,
    report: ReportActivity = unheard,
    find: FindCheckpoint | None = None,
) -> Engine:
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
        sending_slabs=SEND_BUFFERS if set(UNMAPPED) & set(settings.transports) else 0,
        slabs_on_device=endpoint_options(settings).on_device(settings.transports),
    )
    if find is None:
        find = partial(open_checkpoint, settings.model, settings.revision)
    checkpoint = find(report)
    grid = Grid(tensor=settings.tensor, stages=settings.pipeline)
    if grid.size > 1:
        return load_split(
            checkpoint,
            grid,
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
        reuses_starts=True,
    )


def _shares_memory(settings: WorkerSettings) -> bool:
    """Whether peers may map the pool itself."""
    return settings.device == "cpu" and "shm" in settings.transports


_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class StepTimesFile(Section):
    """The fields of StepCoefficients."""

    prefill_overhead_s: _Seconds
    prefill_token_s: _Seconds
    prefill_pair_s: _Seconds
    prefill_sequence_s: _Seconds = 0.0
    decode_knots: Annotated[
        tuple[tuple[Annotated[int, Field(ge=1)], Annotated[_Seconds, Field(gt=0)]], ...],
        Field(min_length=1),
    ]
    decode_kv_token_s: _Seconds
    error: _Seconds = 0.0


def read_step_times(path: Path, *, most_sequences: int) -> LinearTimes:
    """Raises ConfigError, naming the file and the key, for what can't be used or says nothing of
    batches of `most_sequences`."""
    raw = read_yaml(path)
    try:
        read = StepTimesFile.model_validate_json(json.dumps(raw, default=str))
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe(error, StepTimesFile)}") from None
    most = read.decode_knots[-1][0]
    if most < most_sequences:
        raise ConfigError(
            f"{path}: decode_knots: up to {most} sequences, expected at least "
            f"scheduler.max_running_requests ({most_sequences})"
        )
    try:
        return LinearTimes(**dict(read))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def step_times(
    settings: WorkerSettings, engine: Engine, report: ReportActivity = unheard
) -> LinearTimes:
    """As `engine.profile` says. Raises ConfigError for a file that can't be used."""
    most = settings.max_running_requests
    match settings.profile:
        case "off":
            return guess_times(engine, most_sequences=most)
        case "auto":
            report(StartActivity(stage=Stage.TIMES))
            return _measured(engine, settings.prefill_chunk_tokens, most)
        case path:
            return read_step_times(Path(path), most_sequences=most)


def _measured(engine: Engine, chunk_tokens: int, most: int) -> LinearTimes:
    started_s = time.monotonic()
    times = profile_times(engine, chunk_tokens=chunk_tokens, most_sequences=most)
    log.info(
        "steps timed in %.1f s: %d prompt tokens take %.1f ms, decode of 1 and of %d %.1f and "
        "%.1f ms; off by %.0f %%",
        time.monotonic() - started_s,
        chunk_tokens,
        1e3 * times.step_s(prefill_work(chunk_tokens)),
        most,
        1e3 * times.step_s(decode_work(1, 0)),
        1e3 * times.step_s(decode_work(most, 0)),
        100 * times.error,
    )
    return times
