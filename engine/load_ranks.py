"""Loads an engine whose model is split over several ranks of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from traceback import clear_frames

from engine.core.activity import ReportActivity, unheard
from engine.core.options import DEFAULT_OPTIONS, CudaOptions
from engine.core.sizing import EngineLimits
from engine.load import load_engine
from engine.model.checkpoint import Checkpoint
from engine.parallel.grid import Grid
from engine.parallel.leader import Leader
from engine.parallel.ranks import check_gpus, rank_devices
from engine.runner import Engine
from kvrelay.errors import ModelError, PeerError


def load_split(
    checkpoint: Checkpoint,
    grid: Grid,
    *,
    threads: int,
    device: str,
    dtype: str,
    block_size: int,
    blocks: int | None,
    limits: EngineLimits,
    attention: str = "auto",
    cuda: CudaOptions = DEFAULT_OPTIONS,
    compiled: bool = True,
    timeout_s: float = 60.0,
    report: ReportActivity = unheard,
) -> Engine:
    """Like `load_engine`, on the ranks of `grid`, of `threads` threads each. The engine is rank 0
    and must be closed; the calling thread must have its number of threads. A rank that another one
    waits for longer than `timeout_s` ends the step with PeerError."""
    devices = rank_devices(device, grid)
    if device != "cpu":
        check_gpus(grid)
    settings = {"dtype": dtype, "block_size": block_size, "blocks": blocks}
    orders = {**settings, "path": str(checkpoint.path), "limits": asdict(limits)}
    orders |= {"attention": attention, "cuda": asdict(cuda), "compiled": compiled}
    leader = Leader(grid, devices, threads, orders, timeout_s)
    try:
        load = partial(
            load_engine,
            checkpoint,
            device=devices[0],
            dtype=dtype,
            block_size=block_size,
            blocks=blocks,
            limits=limits,
            attention=attention,
            cuda=cuda,
            compiled=compiled,
            ranks=leader,
            report=report,
        )
        return _ready(load, leader)
    except BaseException as error:
        follows = isinstance(error, PeerError) or leader.has_lost
        words = leader.last_words() if follows else None
        clear_frames(error.__traceback__)  # they hold graphs, for whose end NCCL's would wait
        leader.close()
        if words is not None:  # the sum failed because a rank ended
            raise ModelError(words) from error
        raise


def _ready(load: Callable[[], Engine], leader: Leader) -> Engine:
    engine = load()
    leader.wait_ready()
    return engine
