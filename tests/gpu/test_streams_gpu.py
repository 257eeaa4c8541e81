"""A worker's transfers on a CUDA device don't wait for the step that runs there."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from engine.device.clock import DeviceClock
from engine.device.streams import StepStream
from kvpool.core.layout.layout import BlockId, KvLayout, LayerGroup, Plane
from kvpool.core.layout.shards import Shard, ShardLayout
from kvpool.core.transfer.piece import Piece
from kvpool.core.transfer.plan import cut
from kvpool.core.transfer.slabs import HEADER_BYTES
from kvpool.core.transfer.write import Side, SlabWrite, TokenSpan
from kvpool.memory.collate import gather_write, read_slab, write_slab
from kvpool.memory.kv_memory import KvMemory

pytestmark = pytest.mark.gpu
_GROUP = LayerGroup(layers=(0, 1), planes=(Plane(name="k", heads=8, dim=128),))
_LONG_CYCLES = 1_000_000_000
_SPAN = TokenSpan(start=0, tokens=64, next_position=64)
_TABLES = (tuple(map(BlockId, (2, 0, 3, 1))),)


def test_steps_of_a_worker_that_goes_first_have_the_higher_priority() -> None:
    """CUDA's lower numbers are the higher priorities."""
    found = []
    for goes_first in (True, False):
        with StepStream(torch.device("cuda"), goes_first=goes_first).within():
            found.append(torch.cuda.current_stream().priority)
    assert found[0] < found[1] == torch.cuda.default_stream().priority


def _random_memory() -> KvMemory:
    layout = KvLayout(groups=(_GROUP,), dtype="bfloat16", block_size=16)
    memory = KvMemory(layout, 4, "cuda")
    memory.planes[0][0].normal_()
    return memory


def _whole(memory: KvMemory) -> SlabWrite:
    one = ShardLayout(model=memory.layout, shard=Shard())
    (write,) = cut(one, one, span=_SPAN, staging_bytes=2**20)
    return write


def test_a_gather_is_queued_with_its_header() -> None:
    """Nobody waits for it but by its mark."""
    memory = _random_memory()
    write, piece = _whole(memory), Piece(span=_SPAN, index=0)
    slab = torch.zeros(HEADER_BYTES + write.nbytes, dtype=torch.uint8, device="cuda")
    facts: dict[str, Any] = {"fingerprint": "5a" * 16, "lease_id": 1, "window": slab}
    write_slab(memory, _TABLES, piece, write, **facts)  # compiled, and the device is warm
    memory.settle()
    expected = slab.clone()
    slab.zero_()
    torch.cuda.synchronize()
    with memory.beside():
        torch.cuda._sleep(_LONG_CYCLES)
        before = torch.cuda.Event()
        before.record()
        write_slab(memory, _TABLES, piece, write, **facts)
        gathered = memory.mark()
        assert not before.query(), "it was waited for"
        gathered()
        assert before.query()
    assert torch.equal(slab, expected)


def test_a_scatter_is_queued_and_its_header_read_at_once() -> None:
    """Nobody waits for the scatter before it."""
    memory, read = _random_memory(), _random_memory()
    write, piece = _whole(memory), Piece(span=_SPAN, index=0)
    slab = torch.zeros(HEADER_BYTES + write.nbytes, dtype=torch.uint8, device="cuda")
    facts: dict[str, Any] = {"fingerprint": "5a" * 16, "lease_id": 1, "window": slab}
    write_slab(memory, _TABLES, piece, write, **facts)
    memory.settle()
    read_slab(read, _TABLES, piece, write, **facts)  # compiled, and the device is warm
    read.flat.zero_()
    torch.cuda.synchronize()
    with read.beside():
        torch.cuda._sleep(_LONG_CYCLES)
        before = torch.cuda.Event()
        before.record()
        read_slab(read, _TABLES, piece, write, **facts)
        scattered = read.mark()
        assert not before.query(), "it was waited for"
        scattered()
    assert torch.equal(read.flat, memory.flat)


def test_a_gather_runs_beside_a_step() -> None:
    memory = _random_memory()
    write = _whole(memory)
    side = Side(tables=_TABLES, block_size=16)
    out = torch.zeros(write.nbytes, dtype=torch.uint8, device="cuda")
    gather_write(memory, side, write, out)  # compiled, and the device is warm
    memory.settle()
    expected = out.clone()
    out.zero_()
    torch.cuda.synchronize()

    step_done = torch.cuda.Event()
    torch.cuda._sleep(_LONG_CYCLES)
    step_done.record()
    with memory.beside():
        gather_write(memory, side, write, out)
        memory.settle()
        assert not step_done.query()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_a_devices_times_are_those_of_the_hosts_clock() -> None:
    """Of work behind other work: it begins when that ends, and ends before the host has waited.
    The device computes alone."""
    device, behind = torch.device("cuda"), torch.cuda.Stream()
    clock = DeviceClock(device)
    for _ in range(2):  # all is loaded in the first turn
        launched_s = time.monotonic()
        with torch.cuda.stream(behind):
            first = clock.begin(None)
            torch.cuda._sleep(_LONG_CYCLES)
            first.end()
            second = clock.begin(None)
            torch.cuda._sleep(_LONG_CYCLES)
            second.end()
        assert not second.is_done
        behind.synchronize()
        waited_s = time.monotonic()
    assert first.is_done and second.is_done
    (begun_s, between_s), (after_s, ended_s) = first.times_s, second.times_s
    off_s = second.within_s
    assert launched_s - off_s <= begun_s < between_s <= after_s + off_s < ended_s
    assert ended_s <= waited_s + off_s
    assert (ended_s - after_s) / (between_s - begun_s) == pytest.approx(1, abs=0.2)
    assert ended_s - begun_s > 0.8 * (waited_s - launched_s), "most of what the host saw"
