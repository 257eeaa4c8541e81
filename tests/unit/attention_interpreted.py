"""The attention kernels, interpreted on the CPU, against plain attention: run by `test_triton` in
a process of its own, where TRITON_INTERPRET=1 holds from the first import on."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.triton.launch import (
    DeviceWork,
    Parts,
    attend,
    part_elements,
    rotate_and_store,
    store,
)
from engine.attention.triton.work import Tiling, most_parts
from engine.compiled.triton.operations import TritonOperations
from engine.model.interface import Scores
from tests.unit.attention_kit import Batch, plain_attention
from tests.unit.test_fused import rotation

assert os.environ.get("TRITON_INTERPRET") == "1", "run by tests/unit/test_triton.py"
_TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    kv_heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3, 4]))
    slices = draw(st.integers(1, 3))
    dim = draw(st.sampled_from([5, 16, 24]))
    return Batch(
        counts=tuple(draw(st.lists(st.integers(1, 9), min_size=slices, max_size=slices))),
        cached=tuple(draw(st.lists(st.integers(0, 70), min_size=slices, max_size=slices))),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=dim,
        value_dim=draw(st.sampled_from([dim, 7])),
        scores=Scores(
            scaling=draw(st.sampled_from([0.3, 1.0])),
            window=draw(st.none() | st.sampled_from([1, 6, 33])),
            softcap=draw(st.none() | st.just(2.0)),
            sinks=draw(st.none() | st.just(torch.linspace(-3, 2, kv_heads * group))),
        ),
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        kv_dtype=draw(st.none() | st.just(torch.float8_e4m3fn)),
        block_size=draw(st.sampled_from([8, 11, 16])),
        seed=draw(st.integers(0, 1000)),
    )


def _run(batch: Batch, *, programs: int, rows: int = 16, keys: int = 16) -> None:
    query = batch.random(batch.tokens, batch.heads, batch.dim)
    planes = batch.planes()
    group = batch.heads // batch.kv_heads
    work = batch.work(tile_tokens=rows // group, programs=programs, key_tile=keys)
    sizes = part_elements(rows, batch.value_dim, most_parts(programs))
    parts = Parts(values=_nan(sizes[0]), sizes=_nan(sizes[1]))
    out = _nan(batch.tokens, batch.heads, batch.value_dim).to(batch.dtype)
    tiling = Tiling(rows=rows, keys=keys, warps=4, stages=2, per_processor=1)
    attend(
        query,
        *planes,
        out,
        DeviceWork(**work),
        parts,
        batch.scores,
        tiling,
        block_size=batch.block_size,
        joined_rows=rows,
    )
    expected = plain_attention(batch, query, *planes)
    worst = float((out.double() - expected).abs().max() / expected.abs().max())
    assert worst <= _TOLERANCE[batch.dtype], worst


def _nan(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


@settings(max_examples=25)
@given(batches(), st.sampled_from([1, 3, 20]))
def test_attention_over_ragged_paged_batches(batch: Batch, programs: int) -> None:
    _run(batch, programs=programs)


def _one(**changes: object) -> Batch:
    scores = Scores(scaling=0.5, sinks=torch.tensor([0.5, -1.0]))
    batch = Batch(
        counts=(1,), cached=(150,), heads=2, kv_heads=1, dim=16, value_dim=16, scores=scores
    )
    return replace(batch, blocks=[], **changes)  # type: ignore[arg-type]


def test_more_parts_than_a_join_reads_at_once() -> None:
    _run(_one(cached=(700,)), programs=40)


def test_parts_in_which_a_query_sees_nothing() -> None:
    """The first queries of a chunk don't see the keys of its last piece."""
    _run(_one(counts=(64,), cached=(0,)), programs=7, rows=128)


def test_large_scores_don_t_overflow() -> None:
    _run(_one(scores=Scores(scaling=300.0)), programs=3)
    _run(_one(scores=Scores(scaling=300.0, softcap=30.0)), programs=3)


def test_fp8_planes_keep_what_is_too_large_as_their_largest() -> None:
    numbers = torch.tensor([0.4, 1.0, -3.25, 440.0, 1000.0, -float("inf")]).view(1, 1, 6)
    keys, values = (torch.zeros(2, 1, 6).to(torch.float8_e4m3fn) for _ in range(2))
    store(numbers, -numbers, keys, values, torch.tensor([1], dtype=torch.int32))
    expected = torch.tensor([0.40625, 1.0, -3.25, 448.0, 448.0, -448.0])
    for plane, sign in ((keys, 1), (values, -1)):
        assert torch.equal(plane[1, 0].float(), sign * expected)
        assert (plane[0].float() == 0).all()


@pytest.mark.parametrize("kept", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 1, 16), (40, 8, 128), (3, 3, 6)])
def test_rotated_and_stored_at_once_is_one_after_the_other(
    heads: int, kv_heads: int, dim: int, kept: torch.dtype
) -> None:
    """Queries, keys and values are parts of one product, as in a merged layer."""
    slots = torch.tensor([7, -1, 0, 8], dtype=torch.int32)
    whole = torch.randn(1, 4, (heads + 2 * kv_heads) * dim).view(1, 4, -1, dim).transpose(1, 2)
    query, key, value = whole.split([heads, kv_heads, kv_heads], dim=1)
    cos, sin = torch.randn(1, 1, 4, dim), torch.randn(1, 1, 4, dim)
    at_once, apart = (torch.zeros(2, 9, kv_heads, dim).to(kept) for _ in range(2))
    asked = rotate_and_store(query[0], key[0], value[0], cos, sin, at_once[0], at_once[1], slots)
    rotate = TritonOperations().rotate
    wide = [rotation(heads, cos, sin)[0].transpose(0, 1) for heads in (query, key)]
    torch.testing.assert_close(asked.double(), wide[0], rtol=1e-6, atol=1e-6)
    if kept == torch.float32:
        stored = at_once[0][slots[slots >= 0]].double()
        torch.testing.assert_close(stored, wide[1][slots >= 0], rtol=1e-6, atol=1e-6)
    store(rotate(key, cos, sin)[0], value[0], apart[0], apart[1], slots)
    assert torch.equal(asked, rotate(query, cos, sin)[0].transpose(0, 1))
    assert torch.equal(at_once.float(), apart.float())
    assert at_once.float().abs().sum() > 0


@pytest.mark.parametrize("dim", [16, 5])
def test_new_kv_reaches_its_slots_and_padded_rows_reach_none(dim: int) -> None:
    keys, values = torch.zeros(9, 3, dim), torch.zeros(9, 3, 4)
    key, value = torch.randn(5, 3, dim).transpose(0, 1), torch.randn(3, 5, 4)
    slots = torch.tensor([7, -1, 0, 8, -1], dtype=torch.int32)
    store(key, value, keys, values, slots)
    for plane, fresh in ((keys, key), (values, value)):
        expected = torch.zeros_like(plane)
        for token, slot in ((0, 7), (2, 0), (3, 8)):
            expected[slot] = fresh[:, token]
        assert torch.equal(plane, expected)
