"""The CPU kernel against attention by definition, over ragged batches of every kind."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.native.kernel import SOURCE, Kernel, open_kernel
from engine.device.native_build import BuildError, built
from engine.model.interface import Scores
from tests.unit.native_kit import Batch, Heads, Slices, make_batch

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
EVERY_KIND: Slices = (
    *((0, 1), (15, 1), (63, 1), (64, 1), (255, 1), (256, 1), (700, 1)),  # decoding
    *((500, 2), (0, 7), (1, 40), (100, 150), (0, 300)),  # chunks
)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """On three threads, whatever the machine has."""
    try:
        opened = open_kernel(built(SOURCE))
    except BuildError as error:
        pytest.skip(str(error))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield opened
    torch.set_num_threads(before)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the names are x86's")
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512"])
@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
def test_older_processors(
    processor: str, dtype: str, kernel: Kernel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Without fused products of bfloat16, with narrower vectors, with none but the first."""
    needs = {"x86-64": "sse2", "haswell": "avx2", "skylake-avx512": "avx512bw"}[processor]
    if needs not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor has no {needs}")
    folder = tmp_path_factory.getbasetemp() / "older"
    older = open_kernel(built(SOURCE, folder, processor))
    heads = Heads(query=6, kv=2, dim=40, value_dim=40)
    if not older.serves(make_batch(((0, 1),), heads, dtype=dtype).layout):
        pytest.skip(f"the compiler has no {dtype} for it")
    batch = make_batch(EVERY_KIND, heads, dtype=dtype, window=300)
    check(batch, older, Scores(scaling=0.3, softcap=9.0, sinks=torch.linspace(-1, 1, 6)))


def check(batch: Batch, kernel: Kernel, scores: Scores) -> None:
    found, expected = batch.attend(kernel, scores), batch.expect(scores)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE[batch.layout.dtype])


def plain(heads: Heads) -> Scores:
    return Scores(scaling=heads.dim**-0.5)


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize(
    "heads",
    [
        Heads(query=9, kv=3, dim=64, value_dim=64),
        Heads(query=4, kv=4, dim=80, value_dim=80),
        Heads(query=16, kv=2, dim=16, value_dim=16),
        Heads(query=32, kv=1, dim=96, value_dim=96),
        Heads(query=8, kv=2, dim=128, value_dim=128),
        Heads(query=3, kv=1, dim=256, value_dim=256),
        Heads(query=6, kv=2, dim=192, value_dim=128),
        Heads(query=4, kv=1, dim=22, value_dim=10),
    ],
    ids=str,
)
def test_heads_of_every_shape(heads: Heads, dtype: str, kernel: Kernel) -> None:
    check(make_batch(EVERY_KIND, heads, dtype=dtype), kernel, plain(heads))


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize("window", [None, 1, 40, 256])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_windows_soft_caps_and_sinks(
    dtype: str, window: int | None, softcap: float | None, has_sinks: bool, kernel: Kernel
) -> None:
    heads = Heads(query=8, kv=2, dim=32, value_dim=32)
    sinks = torch.linspace(-2, 3, heads.query) if has_sinks else None
    scores = Scores(scaling=0.4, window=window, softcap=softcap, sinks=sinks)
    check(make_batch(EVERY_KIND, heads, dtype=dtype, window=window), kernel, scores)


slices = st.tuples(st.integers(0, 600), st.sampled_from([1, 1, 1, 2, 3, 17, 70, 200]))


@settings(max_examples=60)
@given(
    batch=st.lists(slices, min_size=1, max_size=8).map(tuple),
    shape=st.sampled_from([(1, 1), (2, 3), (3, 4), (1, 8), (2, 12)]),
    dim=st.sampled_from([16, 32, 64, 96]),
    block_size=st.integers(1, 32),
    dtype=st.sampled_from(sorted(TOLERANCE)),
    window=st.sampled_from([None, None, 5, 100]),
    seed=st.integers(0, 1000),
)
def test_any_batch(
    batch: Slices,
    shape: tuple[int, int],
    dim: int,
    block_size: int,
    dtype: str,
    window: int | None,
    seed: int,
    kernel: Kernel,
) -> None:
    heads = Heads(query=shape[0] * shape[1], kv=shape[0], dim=dim, value_dim=dim)
    made = make_batch(batch, heads, block_size=block_size, dtype=dtype, window=window, seed=seed)
    check(made, kernel, plain(heads))


def test_new_kv_is_in_its_slots_and_nothing_else_is_touched(kernel: Kernel) -> None:
    heads = Heads(query=4, kv=2, dim=16, value_dim=32)
    batch = make_batch(((3, 1), (40, 90), (0, 5)), heads, dtype="bfloat16")
    before = [plane.clone() for plane in batch.planes]
    batch.attend(kernel, plain(heads))
    slots = torch.from_numpy(batch.step.groups[0].slots)
    for i, (plane, old) in enumerate(zip(batch.planes, before, strict=True)):
        fresh = [batch.texts[s][i][batch.slices[s][0] :] for s in batch.step.order]
        old[slots] = torch.cat(fresh)
        assert torch.equal(plane.view(torch.int16), old.view(torch.int16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_is_the_same_whatever_else_is_in_the_step(dtype: str, kernel: Kernel) -> None:
    """To the bit: neither other rows nor the number of threads change a sum's order."""
    heads = Heads(query=9, kv=3, dim=64, value_dim=64)
    batch = make_batch(((700, 1), (513, 1), (100, 150), (0, 300)), heads, dtype=dtype)
    together = batch.attend(kernel, plain(heads))
    alone = dataclasses.replace(kernel, fork=0)
    assert torch.equal(batch.attend(alone, plain(heads)), together)
    for slice_, row in ((700, 0), (513, 1)):
        one = make_batch(((slice_, 1),), heads, dtype=dtype)
        place = batch.slices.index((slice_, 1))
        one.texts[0], one.query = batch.texts[place], batch.query[row : row + 1]
        for plane, text in zip(one.planes, one.texts[0], strict=True):
            table = one.step.groups[0].tables
            slots = [table[i // 16] * 16 + i % 16 for i in range(slice_)]
            plane[slots] = text[:slice_]
        assert torch.equal(one.attend(kernel, plain(heads)), together[row : row + 1])


def test_a_query_that_is_no_plain_row_is_read_by_its_strides(kernel: Kernel) -> None:
    heads = Heads(query=4, kv=2, dim=16, value_dim=16)
    batch = make_batch(EVERY_KIND, heads)
    expected = batch.attend(kernel, plain(heads))
    batch.query = batch.query.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert torch.equal(batch.attend(kernel, plain(heads)), expected)
