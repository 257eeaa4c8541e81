"""Times one link: messages, writes and reads of a few sizes, the smallest first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from kvpool.core.transfer.link_cost import Sample, TimedStep
from kvpool.transport.peer.base import Connection, Read, RegionName

PROBE_BYTES = 32 * 2**20
"""The region that each worker keeps for probes: with the peer's, larger than most caches."""

BUDGET_S = 0.25
_DESCRIPTORS = (1, 16, 256)
_ROUNDS = 4  # of which the first warms up
_SIZES = (2**14, 2**18, 2**22, PROBE_BYTES // _ROUNDS)
_MESSAGES = 8


def measure(
    connection: Connection,
    region: RegionName,
    own: torch.Tensor,
    slab_bytes: int,
    ping: Callable[[], None],
) -> list[Sample]:
    """`region` is the peer's probe region, `own` ours (uint8 `[PROBE_BYTES]`); both get garbage.
    Writes are no larger than a slab: on a CPU those that leave its cache are slower. `ping` returns
    when the peer has answered. Ends soon after BUDGET_S, but always measures the smallest size.
    Raises PeerError."""
    end_s = time.monotonic() + BUDGET_S
    samples = [Sample(step=TimedStep.MESSAGE, seconds=median(_timed([ping] * _MESSAGES)))]
    for size in _SIZES:
        written = size <= max(slab_bytes, _SIZES[0])
        for pieces in (0, *_DESCRIPTORS) if written else _DESCRIPTORS:
            if time.monotonic() > end_s and size > _SIZES[0]:
                return samples
            samples.append(_sample(connection, region, own, size, pieces))
    return samples


def _sample(
    connection: Connection, region: RegionName, own: torch.Tensor, size: int, pieces: int
) -> Sample:
    """A write without `pieces`, from memory that is reused as a slab is; else a read in this many
    pieces. Each round uses another place."""
    if not pieces:
        writes = [partial(connection.write, region, at, own[:size]) for at in _STARTS]
        return Sample(step=TimedStep.WRITE, nbytes=size, seconds=min(_timed(writes)))
    batches = [_scattered(region, own, at, size, pieces) for at in _STARTS]
    reads = [partial(connection.read_many, batch) for batch in batches]
    return Sample(step=TimedStep.READ, nbytes=size // 2, pieces=pieces, seconds=min(_timed(reads)))


_STARTS = tuple(i * (PROBE_BYTES // _ROUNDS) for i in range(_ROUNDS))


def _scattered(
    region: RegionName, own: torch.Tensor, start: int, size: int, pieces: int
) -> list[Read]:
    """`size / 2` bytes in pieces with gaps of their size, which no link can merge."""
    stride = size // pieces
    places = range(start, start + pieces * stride, stride)
    return [Read(region, at, own[at : at + stride // 2]) for at in places]


def _timed(rounds: Sequence[Callable[[], None]]) -> list[float]:
    """Seconds of all rounds but the first. Disturbances make a copy slower, never faster."""
    taken = []
    for run in rounds:
        started_s = time.monotonic()
        run()
        taken.append(time.monotonic() - started_s)
    return taken[1:]
