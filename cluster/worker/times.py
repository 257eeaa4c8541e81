"""How long a worker's steps take before it has served anyone: measured, read or guessed."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from cluster.settings import WorkerSettings
from cluster.worker.step_times_file import read_step_times
from engine.activity import Activity, Report, Stage, unheard
from engine.latency import decode_work, prefill_work
from engine.latency_fit import LinearTimes
from engine.runner import Engine
from engine.time_profile import guess_times, profile_times

log = logging.getLogger(__name__)


def step_times(settings: WorkerSettings, engine: Engine, report: Report = unheard) -> LinearTimes:
    """As `engine.profile` says. Raises ConfigError for a file that can't be used."""
    most = settings.max_running_requests
    match settings.profile:
        case "off":
            return guess_times(engine, most_sequences=most)
        case "auto":
            report(Activity(stage=Stage.TIMES))
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
