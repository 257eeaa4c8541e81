"""Loads an engine whose model is shared out among several ranks of this machine."""

from __future__ import annotations

from dataclasses import asdict

from engine.checkpoint import Checkpoint
from engine.load import load_engine
from engine.parallel.leader import Leader
from engine.runner import Engine
from engine.sizing import EngineLimits
from kvrelay.errors import ModelError, PeerError


def load_split(
    checkpoint: Checkpoint,
    size: int,
    *,
    threads: int,
    device: str,
    dtype: str,
    block_size: int,
    blocks: int | None,
    limits: EngineLimits,
    attention: str = "auto",
    compiled: bool = True,
) -> Engine:
    """As `load_engine`, on `size` ranks of `threads` threads each. The engine is rank 0, and is to
    be closed; the calling thread is to have its number of threads."""
    if device != "cpu":
        raise ModelError(
            f"parallel.tensor {size} on {device}: ranks share the host's memory so far: set it to 1"
        )
    settings = {"device": device, "dtype": dtype, "block_size": block_size, "blocks": blocks}
    orders = {**settings, "path": str(checkpoint.path), "limits": asdict(limits)}
    orders |= {"attention": attention, "compiled": compiled}
    leader = Leader(size, threads, orders)
    try:
        return load_engine(
            checkpoint,
            device=device,
            dtype=dtype,
            block_size=block_size,
            blocks=blocks,
            limits=limits,
            attention=attention,
            compiled=compiled,
            ranks=leader,
        )
    except BaseException as error:
        words = leader.last_words() if isinstance(error, PeerError) else None
        leader.close()
        if words is not None:  # a sum whose other parts don't come
            raise ModelError(words) from error
        raise
