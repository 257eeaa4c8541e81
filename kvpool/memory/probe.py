"""How fast this worker gathers and scatters: timed at its start, on a small pool of the same
layout. Blocks in use are never touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from kvpool.codec import Codec
from kvpool.codec_choice import CodecSpeed
from kvpool.layout import BlockId, KvLayout, Tables
from kvpool.link_cost import Sample, Step
from kvpool.memory.kv_memory import KvMemory
from kvpool.memory.sections import gather_write, scatter_write
from kvpool.plan import token_runs
from kvpool.shard import Shard, ShardLayout
from kvpool.slab import checksum
from kvpool.transfer_plan import cut
from kvpool.write import Side, TokenSpan, Write

_MOST_BYTES = 32 * 2**20
_ROUNDS = 4  # of which the first warms up


def measure_copies(
    layout: KvLayout, device: torch.device | str, ranks: int = 1
) -> tuple[Sample, ...]:
    """Of all layers: blocks that lie together, and blocks that lie apart."""
    blocks = max(2, min(256, _MOST_BYTES // layout.bytes_per_block))
    memory = KvMemory(layout, blocks, device, ranks=ranks)
    return tuple(sample for count in sorted({2, blocks}) for sample in _samples(memory, count))


def measure_codecs(
    layout: KvLayout, device: torch.device | str, codecs: Iterable[Codec], ranks: int = 1
) -> tuple[CodecSpeed, ...]:
    """On blocks that lie together: what lies apart costs a run each, whatever the codec."""
    blocks = max(2, min(256, _MOST_BYTES // layout.bytes_per_block))
    memory = KvMemory(layout, blocks, device, ranks=ranks)
    return tuple(_codec_speed(memory, codec) for codec in codecs)


def _codec_speed(memory: KvMemory, codec: Codec) -> CodecSpeed:
    size = memory.layout.block_size
    plain = _write(memory.layout, memory.blocks * size)
    write, elements = plain.encoded(codec), plain.nbytes / memory.layout.element_bytes
    slab = torch.zeros(write.nbytes, dtype=torch.uint8)
    side = Side(tables=_tables(memory, _together(memory.blocks)), block_size=size)
    encode_s = _least(partial(gather_write, memory, side, write, slab), memory.device)
    decode_s = _least(partial(scatter_write, memory, side, write, slab), memory.device)
    return CodecSpeed(
        codec=codec, encode_per_s=elements / encode_s, decode_per_s=elements / decode_s
    )


def _samples(memory: KvMemory, blocks: int) -> Iterator[Sample]:
    size = memory.layout.block_size
    write = _write(memory.layout, blocks * size)
    slab = torch.zeros(write.nbytes, dtype=torch.uint8)
    for table in (_together(blocks), _apart(blocks)):
        side = Side(tables=_tables(memory, table), block_size=size)
        runs = len(token_runs(table, 0, blocks * size, size)) * len(memory.layout.groups)
        for step, run in (
            (Step.GATHER, partial(_checked, gather_write, memory, side, write, slab)),
            (Step.SCATTER, partial(_checked, scatter_write, memory, side, write, slab)),
        ):
            seconds = _least(run, memory.device)
            yield Sample(step=step, nbytes=write.nbytes, pieces=runs, seconds=seconds)


def _checked(
    copy: Callable[[KvMemory, Side, Write, torch.Tensor], None],
    memory: KvMemory,
    side: Side,
    write: Write,
    slab: torch.Tensor,
) -> None:
    """With the checksum, as in a transfer."""
    copy(memory, side, write, slab)
    memory.settle()
    checksum(slab.numpy().data)


def _write(layout: KvLayout, tokens: int) -> Write:
    """All that the tokens have, whatever the windows."""
    one = ShardLayout(model=layout, shard=Shard())
    span = TokenSpan(start=0, tokens=tokens, next_position=0)
    (write,) = cut(one, one, span=span, staging_bytes=layout.bytes_per_token * tokens)
    return write


def _tables(memory: KvMemory, table: tuple[BlockId, ...]) -> Tables:
    return tuple(table for _ in memory.layout.groups)


def _together(blocks: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(i) for i in range(blocks))


def _apart(blocks: int) -> tuple[BlockId, ...]:
    """No block follows its neighbour."""
    return tuple(BlockId(i) for i in reversed(range(blocks)))


def _least(run: Callable[[], None], device: torch.device) -> float:
    taken = []
    for _ in range(_ROUNDS):
        started_s = time.monotonic()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.monotonic() - started_s)
    return min(taken[1:])
