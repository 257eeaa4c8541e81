"""Gather and scatter of planned writes between random shards, against the executor in numpy."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings

from kvpool.memory import KvMemory
from kvpool.memory_sections import gather_write, scatter_write
from kvpool.shard import ShardLayout
from tests.unit.transfer_kit import Case, Move, Pool, carry_out, cases, new_trial


def _memory_over(pool: Pool, layout: ShardLayout) -> KvMemory:
    """A rank's memory whose tensors are the arrays of `pool`."""
    local = layout.local
    memory = KvMemory(local, pool[0][0].shape[1] // local.block_size, "cpu")
    dtype = getattr(torch, local.dtype)
    for planes, arrays in zip(memory.planes, pool, strict=True):
        for i, array in enumerate(arrays):
            assert planes[i].shape == array.shape
            signed = np.int16 if array.itemsize == 2 else np.int32
            planes[i] = torch.from_numpy(array.view(signed)).view(dtype)
    return memory


def _gathered(move: Move) -> list[torch.Tensor]:
    memory, slabs = _memory_over(move.pool, move.layout), []
    for write in move.transfer.writes:
        slabs.append(torch.zeros(write.nbytes, dtype=torch.uint8))
        gather_write(memory, move.transfer.source, write, slabs[-1])
    return slabs


@settings(deadline=None, max_examples=80)
@given(cases())
def test_planned_writes_arrive_byte_for_byte(case: Case) -> None:
    trial = new_trial(case)
    target = _memory_over(trial.target, case.target)
    for move in trial.moves:
        for write, slab in zip(move.transfer.writes, _gathered(move), strict=True):
            scatter_write(target, move.transfer.target, write, slab)
    for planes, wanted in zip(trial.target, trial.expected, strict=True):
        for ours, theirs in zip(planes, wanted, strict=True):
            assert np.array_equal(ours, theirs)


@settings(deadline=None, max_examples=40)
@given(cases())
def test_a_slab_is_in_canonical_order(case: Case) -> None:
    trial = new_trial(case)
    for move in trial.moves:
        slabs = carry_out(move.transfer, move.pool, trial.target, move.layout.model.dtype)
        for ours, naive in zip(_gathered(move), slabs, strict=True):
            assert ours.numpy().tobytes() == naive.tobytes()
