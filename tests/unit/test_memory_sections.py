"""Gather and scatter of planned writes between random shards, against the executor in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from numpy.typing import NDArray

from kvpool.core.layout.layout import NO_BLOCK, BlockId, KvLayout, LayerGroup, Plane
from kvpool.core.layout.shards import Shard, ShardLayout
from kvpool.core.transfer.plan import cut
from kvpool.core.transfer.write import Side, SlabWrite, TokenSpan
from kvpool.memory.collate import gather_write, scatter_write
from kvpool.memory.kv_memory import KvMemory
from tests.unit.transfer_kit import Case, Move, Pool, carry_out, cases, new_trial


def _memory_of(pool: Pool, layout: ShardLayout) -> KvMemory:
    """A rank's memory that holds what the arrays of `pool` hold."""
    local = layout.local
    memory = KvMemory(local, pool[0][0].shape[1] // local.block_size, "cpu")
    for planes, arrays in zip(memory.planes, pool, strict=True):
        for plane, array in zip(planes, arrays, strict=True):
            assert plane.shape == array.shape
            _bits(plane)[...] = array.view(_bits(plane).dtype)
    return memory


def _bits(plane: torch.Tensor) -> NDArray[np.signedinteger]:
    """The plane's own memory, as integers: numpy knows no bfloat16."""
    return plane.view(torch.int16 if plane.element_size() == 2 else torch.int32).numpy()


def _gathered(move: Move) -> list[torch.Tensor]:
    memory, slabs = _memory_of(move.pool, move.layout), []
    for write in move.transfer.writes:
        slabs.append(torch.zeros(write.nbytes, dtype=torch.uint8))
        gather_write(memory, move.transfer.source, write, slabs[-1])
    return slabs


@settings(max_examples=80)
@given(cases())
def test_planned_writes_arrive_byte_for_byte(case: Case) -> None:
    trial = new_trial(case)
    target = _memory_of(trial.target, case.target)
    for move in trial.moves:
        for write, slab in zip(move.transfer.writes, _gathered(move), strict=True):
            scatter_write(target, move.transfer.target, write, slab)
    for planes, wanted in zip(target.planes, trial.expected, strict=True):
        for ours, theirs in zip(planes, wanted, strict=True):
            assert np.array_equal(_bits(ours), theirs.view(_bits(ours).dtype))


@settings(max_examples=40)
@given(cases())
def test_a_slab_is_in_canonical_order(case: Case) -> None:
    trial = new_trial(case)
    for move in trial.moves:
        slabs = carry_out(move.transfer, move.pool, trial.target, move.layout.model.dtype)
        for ours, naive in zip(_gathered(move), slabs, strict=True):
            assert ours.numpy().tobytes() == naive.tobytes()


def _whole_write(layout: KvLayout, start: int, tokens: int) -> SlabWrite:
    """All layers and heads, between equal ranks."""
    one = ShardLayout(model=layout, shard=Shard())
    span = TokenSpan(start=start, tokens=tokens, next_position=start + tokens)
    (write,) = cut(one, one, span=span, staging_bytes=1 << 30)
    return write


@pytest.mark.parametrize("order", [[1, 2, 3, 4], [1, 2, 6, 7], [4, 3, 2, 1]])
def test_long_runs_of_blocks_arrive_byte_for_byte(order: list[int]) -> None:
    """Blocks of 4 MiB, some adjacent; a slab that starts inside one."""
    plane = Plane(name="k", heads=4, dim=256)
    group = LayerGroup(layers=(0, 1), planes=(plane,))
    layout = KvLayout(groups=(group,), dtype="bfloat16", block_size=1024)
    source, target = KvMemory(layout, 8, "cpu"), KvMemory(layout, 8, "cpu")
    source.planes[0][0].normal_()
    side = Side(tables=(tuple(map(BlockId, order)),), block_size=1024)
    write = _whole_write(layout, 500, 3 * 1024)
    slab = torch.zeros(write.nbytes, dtype=torch.uint8)
    gather_write(source, side, write, slab)
    scatter_write(target, side, write, slab)
    slots = [order[t // 1024] * 1024 + t % 1024 for t in range(500, 500 + 3 * 1024)]
    wanted = torch.zeros_like(source.planes[0][0])
    wanted[:, slots] = source.planes[0][0][:, slots]
    assert torch.equal(target.planes[0][0], wanted)
    assert torch.equal(slab.view(torch.bfloat16).view(2, -1, 4, 256), wanted[:, slots])


def test_kv_of_a_byte_a_value_arrives_byte_for_byte() -> None:
    """Odd shapes: no row is a whole number of words."""
    planes = (Plane(name="k", heads=3, dim=5), Plane(name="v", heads=1, dim=7))
    group = LayerGroup(layers=(0, 1), planes=planes)
    layout = KvLayout(groups=(group,), dtype="float8_e4m3fn", block_size=4)
    source, target = KvMemory(layout, 6, "cpu"), KvMemory(layout, 6, "cpu")
    source.flat.random_(1, 256)
    side = Side(tables=(tuple(map(BlockId, [4, 1, 5])),), block_size=4)
    write = _whole_write(layout, 2, 9)
    slab = torch.zeros(write.nbytes, dtype=torch.uint8)
    gather_write(source, side, write, slab)
    scatter_write(target, side, write, slab)
    slots = [18, 19, 4, 5, 6, 7, 20, 21, 22]
    for ours, theirs in zip(target.planes[0], source.planes[0], strict=True):
        found, sent = ours.view(torch.uint8), theirs.view(torch.uint8)
        assert torch.equal(found[:, slots], sent[:, slots])
        assert int((found != 0).sum()) == sent[:, slots].numel()


def test_a_block_that_is_not_held_is_never_read() -> None:
    layout = KvLayout(
        groups=(LayerGroup(layers=(0,), planes=(Plane(name="k", heads=1, dim=8),)),),
        dtype="bfloat16",
        block_size=4,
    )
    write = _whole_write(layout, 0, 8)
    for table in [(NO_BLOCK, BlockId(1)), (BlockId(1),)]:
        side = Side(tables=(table,), block_size=4)
        out = torch.zeros(write.nbytes, dtype=torch.uint8)
        with pytest.raises(AssertionError, match="block"):
            gather_write(KvMemory(layout, 4, "cpu"), side, write, out)
