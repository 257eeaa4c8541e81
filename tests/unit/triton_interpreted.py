"""The Triton kernels, interpreted on the CPU, against the CPU's executors: run by `test_triton` in
a process of its own, where TRITON_INTERPRET=1 holds from the first import on."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core.layout.codec import Codec
from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane, Tables
from kvpool.core.layout.shards import End, Shard, ShardLayout
from kvpool.core.transfer.plan import cut
from kvpool.core.transfer.write import Side, SlabSection, SlabWrite, TokenSpan
from kvpool.memory.collate import gather_write, scatter_write
from kvpool.memory.kv_memory import KvMemory
from kvpool.memory.triton import gather_planes, scatter_planes
from kvpool.memory.views import plane_views, row_index
from tests.unit.pieces_kit import assert_copied_alike

assert os.environ.get("TRITON_INTERPRET") == "1", "run by tests/unit/test_triton.py"
_DTYPES = st.sampled_from(["bfloat16", "float16", "float32"])
_FP8 = st.just("float8_e4m3fn")
"""KV of a byte a value is moved as it is, without a codec."""


@dataclass(frozen=True, kw_only=True)
class Case:
    source: ShardLayout
    target: ShardLayout
    span: TokenSpan
    codec: Codec
    wire_dtype: str | None
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtypes = draw(st.sampled_from([_DTYPES, _DTYPES, _DTYPES, _FP8]))
    planes = tuple(
        Plane(name=f"p{i}", heads=draw(st.sampled_from([1, 2, 4, 6])), dim=draw(_DIMS))
        for i in range(draw(st.integers(1, 2)))
    )
    group = LayerGroup(layers=tuple(range(draw(st.integers(1, 2)))), planes=planes)
    ranks = [
        ShardLayout(
            model=KvLayout(
                groups=(group,), dtype=draw(dtypes), block_size=draw(st.sampled_from([3, 16]))
            ),
            shard=draw(st.sampled_from([Shard(), Shard(rank=1, size=2)])),
        )
        for _ in range(2)
    ]
    start, tokens = draw(st.integers(0, 20)), draw(st.integers(1, 70))
    return Case(
        source=ranks[0],
        target=ranks[1],
        span=TokenSpan(start=start, tokens=tokens, next_position=start + tokens),
        codec=draw(st.sampled_from([Codec.NONE] if dtypes is _FP8 else list(Codec))),
        wire_dtype=draw(st.none() | dtypes),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


_DIMS = st.sampled_from([1, 5, 8, 64])


def _memory(layout: ShardLayout, blocks: int, seed: int) -> KvMemory:
    """Numbers of very different sizes, from slot to slot and from head to head."""
    memory, generator = KvMemory(layout.local, blocks, "cpu"), torch.Generator().manual_seed(seed)
    for plane in memory.planes[0]:
        sizes = torch.randint(-12, 13, plane.shape[:3], generator=generator)
        values = torch.randn(plane.shape, generator=generator)
        plane.copy_(values * torch.exp2(sizes[..., None].float()))
    return memory


def _tables(layout: ShardLayout, span: TokenSpan, draw: np.random.Generator) -> Tables:
    blocks = layout.model.blocks_for(span.start + span.tokens)
    return (tuple(draw.permutation(blocks + 2)[:blocks].tolist()),)


def _slots(side: Side, section: SlabSection) -> torch.Tensor:
    return row_index(side.tables[section.part.group], section, side.block_size)


def _gather_interpreted(memory: KvMemory, side: Side, write: SlabWrite, out: torch.Tensor) -> None:
    for section in write.sections:
        views = plane_views(memory, section, write.wire, out, End.SOURCE)
        gather_planes(views, _slots(side, section), write.wire)


def _scatter_interpreted(
    memory: KvMemory, side: Side, write: SlabWrite, slab: torch.Tensor
) -> None:
    for section in write.sections:
        views = plane_views(memory, section, write.wire, slab, End.TARGET)
        scatter_planes(views, _slots(side, section), write.wire)


def _writes(case: Case) -> tuple[SlabWrite, ...]:
    return cut(
        case.source,
        case.target,
        span=case.span,
        staging_bytes=1 << 20,
        codec=case.codec,
        wire_dtype=case.wire_dtype,
    )


@settings(max_examples=40)
@given(cases())
def test_kernels_move_the_same_bytes_as_the_cpus_executors(case: Case) -> None:
    draw = np.random.default_rng(case.seed)
    tables = [_tables(layout, case.span, draw) for layout in (case.source, case.target)]
    sides = [
        Side(tables=held, block_size=layout.model.block_size)
        for held, layout in zip(tables, (case.source, case.target), strict=True)
    ]
    source = _memory(case.source, len(tables[0][0]) + 2, case.seed)
    targets = [_memory(case.target, len(tables[1][0]) + 2, 1) for _ in range(2)]
    for write in _writes(case):
        slabs = [torch.full((write.nbytes,), 0xA5, dtype=torch.uint8) for _ in range(2)]
        gather_write(source, sides[0], write, slabs[0])
        _gather_interpreted(source, sides[0], write, slabs[1])
        _assert_same(*(_elements(slab, write) for slab in slabs))
        scatter_write(targets[0], sides[1], write, slabs[0])
        _scatter_interpreted(targets[1], sides[1], write, slabs[0])
    for ours, theirs in zip(targets[0].planes[0], targets[1].planes[0], strict=True):
        _assert_same(ours, theirs)


@pytest.mark.parametrize("seed", range(12))
def test_pools_are_copied_as_the_cpu_copies_them(seed: int) -> None:
    assert_copied_alike(seed, "cpu")


def _elements(slab: torch.Tensor, write: SlabWrite) -> torch.Tensor:
    return slab.view(getattr(torch, write.wire.dtype)) if write.wire.codec is Codec.NONE else slab


def _assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Bit by bit, but that the interpreter, unlike any device, cuts bfloat16 off instead of
    rounding: then by at most one in the last place."""
    if ours.dtype is torch.bfloat16:
        difference = ours.view(torch.int16).int() - theirs.view(torch.int16).int()
        assert ((difference == 0) | (difference == 1)).all()
    else:
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


_SPECIAL = [0.0, -0.0, 1e-44, -1e-38, 3e38, -448.0, 0.4375, 2.0**-9, -(2.0**-10), 3 * 2.0**-10]


@pytest.mark.parametrize("codec", [Codec.FP8, Codec.INT8])
@pytest.mark.parametrize("scaled", [True, False])
def test_ties_subnormals_and_limits_are_rounded_alike(codec: Codec, scaled: bool) -> None:
    """`scaled`: a 448 in each block and head makes the e4m3 scale 1, so that ties are exact."""
    layout = _one_head_layout()
    source, targets = KvMemory(layout, 1, "cpu"), [KvMemory(layout, 1, "cpu") for _ in range(2)]
    numbers = torch.arange(-(2**11), 2**11).float() * 2.0**-10
    numbers[: len(_SPECIAL)] = torch.tensor(_SPECIAL)
    if scaled:
        numbers[4] = 1.0
        numbers[::256] = 448.0
    source.planes[0][0].view(-1).copy_(numbers)
    _compare(source, targets, codec)


def _one_head_layout() -> KvLayout:
    group = LayerGroup(layers=(0,), planes=(Plane(name="k", heads=1, dim=16),))
    return KvLayout(groups=(group,), dtype="float32", block_size=256)


def _compare(source: KvMemory, targets: list[KvMemory], codec: Codec) -> None:
    one = ShardLayout(model=source.layout, shard=Shard())
    span = TokenSpan(start=0, tokens=256, next_position=256)
    (write,) = cut(one, one, span=span, staging_bytes=1 << 20, codec=codec)
    side = Side(tables=((0,),), block_size=256)
    slabs = [torch.zeros(write.nbytes, dtype=torch.uint8) for _ in range(2)]
    gather_write(source, side, write, slabs[0])
    _gather_interpreted(source, side, write, slabs[1])
    assert torch.equal(slabs[0], slabs[1])
    scatter_write(targets[0], side, write, slabs[0])
    _scatter_interpreted(targets[1], side, write, slabs[0])
    ours, theirs = (target.planes[0][0] for target in targets)
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("codec", [Codec.FP8, Codec.INT8])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_marks_its_block_and_head_only(codec: Codec, broken: float) -> None:
    layout = replace(_one_head_layout(), block_size=32)
    one = ShardLayout(model=layout, shard=Shard())
    span = TokenSpan(start=0, tokens=32, next_position=32)
    (write,) = cut(one, one, span=span, staging_bytes=1 << 20, codec=codec)
    memory, side = KvMemory(layout, 1, "cpu"), Side(tables=((0,),), block_size=32)
    plane = memory.planes[0][0]
    plane.fill_(1.0)
    plane[0, 3, 0, 2] = broken
    slab = torch.zeros(write.nbytes, dtype=torch.uint8)
    _gather_interpreted(memory, side, write, slab)
    _scatter_interpreted(memory, side, write, slab)
    assert plane[0, :16].isnan().all()
    assert (plane[0, 16:] == 1).all()
