"""Measures how fast this worker gathers, scatters and prepares reads, in the first blocks of its
pool: where ranks have GPUs of their own, these copies go between GPUs. Only at its start, when no
block is in use. The blocks are zeros afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from kvpool.core.layout.codec import Codec
from kvpool.core.layout.layout import BlockId, KvLayout, Tables
from kvpool.core.layout.shards import Shard, ShardLayout
from kvpool.core.transfer.codec_choice import CodecSpeed
from kvpool.core.transfer.link_cost import Sample, TimedStep
from kvpool.core.transfer.plan import cut
from kvpool.core.transfer.slabs import checksum
from kvpool.core.transfer.write import Side, SlabWrite, TokenSpan
from kvpool.memory.collate import gather_write, scatter_write
from kvpool.memory.direct import reads_of
from kvpool.memory.kv_memory import KvMemory
from kvpool.transport.peer.base import RegionName

_MOST_BYTES = 64 * 2**20  # more than most caches hold
_ROUNDS = 4  # of which the first warms up


def blocks_measured(layout: KvLayout) -> int:
    """How many blocks of a large pool are copied."""
    return max(2, min(256, _MOST_BYTES // layout.bytes_per_block))


def measure_copies(memory: KvMemory, slab_bytes: int) -> dict[str, tuple[Sample, ...]]:
    """# type of the device on which slabs lie |-> copies of all layers, in pieces of at most
    `slab_bytes`, of adjacent blocks and of scattered blocks"""
    with _blocks(memory) as blocks:
        counts = sorted({min(2, blocks), blocks})
        return {
            place: tuple(s for count in counts for s in _samples(memory, count, slab_bytes, place))
            for place in {"cpu", memory.device.type}
        }


def measure_codecs(
    memory: KvMemory, codecs: Iterable[Codec], slab_bytes: int
) -> tuple[CodecSpeed, ...]:
    """Uses adjacent blocks: scattered ones cost one run each, whatever the codec."""
    with _blocks(memory) as blocks:
        return tuple(_codec_speed(memory, blocks, codec, slab_bytes) for codec in codecs)


@contextmanager
def _blocks(memory: KvMemory) -> Iterator[int]:
    """The number of blocks to copy, which are wiped afterwards: what one codec has written may be
    no numbers for attention."""
    blocks = min(blocks_measured(memory.layout), memory.blocks)
    yield blocks
    for plane in (plane for part in memory.parts for planes in part.planes for plane in planes):
        plane[:, : blocks * memory.layout.block_size].view(torch.uint8).zero_()
    memory.settle()


def _codec_speed(memory: KvMemory, blocks: int, codec: Codec, slab_bytes: int) -> CodecSpeed:
    size = memory.layout.block_size
    plain = _writes(memory.layout, blocks * size, slab_bytes)
    writes = [write.encoded(codec) for write in plain]
    slab = torch.zeros(max(write.nbytes for write in writes), dtype=torch.uint8)
    side = Side(tables=_tables(memory, _together(blocks)), block_size=size)
    elements = sum(write.nbytes for write in plain) / memory.layout.element_bytes
    encode_s, decode_s = (
        _least(partial(_checked, copy, memory, side, writes, slab), memory.device)
        for copy in (gather_write, scatter_write)
    )
    return CodecSpeed(
        codec=codec, encode_per_s=elements / encode_s, decode_per_s=elements / decode_s
    )


def _samples(memory: KvMemory, blocks: int, slab_bytes: int, place: str) -> Iterator[Sample]:
    size = memory.layout.block_size
    writes = _writes(memory.layout, blocks * size, slab_bytes)
    device = memory.device if place == memory.device.type else place
    slab = torch.zeros(max(write.nbytes for write in writes), dtype=torch.uint8, device=device)
    for table in (_together(blocks), _apart(blocks)):
        side = Side(tables=_tables(memory, table), block_size=size)
        runs = sum(len(side.runs(section)) for write in writes for section in write.sections)
        yield _prepared(memory, side, writes)
        for step, copy in ((TimedStep.GATHER, gather_write), (TimedStep.SCATTER, scatter_write)):
            seconds = _least(partial(_checked, copy, memory, side, writes, slab), memory.device)
            nbytes = sum(write.nbytes for write in writes)
            yield Sample(step=step, nbytes=nbytes, pieces=runs, seconds=seconds)


def _prepared(memory: KvMemory, side: Side, writes: Sequence[SlabWrite]) -> Sample:
    """Prepares the descriptors for a read of a pool with as many ranks as ours, all layers on
    each: peers' pools that lie apart are not read."""
    theirs = replace(memory.map, stages=())

    def name() -> int:
        batches = (reads_of(memory, side, theirs, RegionName(""), side, w) for w in writes)
        return sum(len([*batch]) for batch in batches)

    return Sample(step=TimedStep.PREPARE, pieces=name(), seconds=_least(name, memory.device))


def _checked(
    copy: Callable[[KvMemory, Side, SlabWrite, torch.Tensor], None],
    memory: KvMemory,
    side: Side,
    writes: Sequence[SlabWrite],
    slab: torch.Tensor,
) -> None:
    """One after another through the same slab, each with its checksum if the slab is the host's, as
    in a transfer."""
    for write in writes:
        payload = slab[: write.nbytes]
        copy(memory, side, write, payload)
        memory.settle()
        if payload.is_cpu:
            checksum(payload.numpy().data)


def _writes(layout: KvLayout, tokens: int, slab_bytes: int) -> tuple[SlabWrite, ...]:
    """All KV of the tokens, regardless of windows."""
    one = ShardLayout(model=layout, shard=Shard())
    span = TokenSpan(start=0, tokens=tokens, next_position=0)
    return cut(one, one, span=span, staging_bytes=slab_bytes)


def _tables(memory: KvMemory, table: tuple[BlockId, ...]) -> Tables:
    return tuple(table for _ in memory.layout.groups)


def _together(blocks: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(i) for i in range(blocks))


def _apart(blocks: int) -> tuple[BlockId, ...]:
    """No block is followed by its neighbour."""
    return tuple(BlockId(i) for i in reversed(range(blocks)))


def _least(run: Callable[[], object], device: torch.device) -> float:
    taken = []
    for _ in range(_ROUNDS):
        started_s = time.monotonic()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.monotonic() - started_s)
    return min(taken[1:])
