"""Operations chained for few rows: exact sums, the same to the bit in any company."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from engine.compiled.build import compile_model
from engine.compiled.chain import BufferPlace, Chain, Plan
from engine.compiled.chaining import FEW_TOKENS
from engine.compiled.library import SOURCE, Fused, Op, OpKind, OpValue, open_fused, open_library
from engine.device.native_build import built
from engine.family.build import load_model
from engine.model import packed_linear
from engine.model.checkpoint import open_checkpoint
from engine.model.interface import Scores, attention_state
from engine.model.model import Model
from engine.model.packed_linear import Packed, pack, panel_depth
from tests.models import random_checkpoint

pytestmark = pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(),
    reason="without AVX-512 oneDNN orders weights otherwise, and products are left to it",
)
not_in_bfloat16 = pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported() or not torch.cpu._is_avx512_bf16_supported(),
    reason="for AMX, and without AVX-512's products of bfloat16, oneDNN orders weights of bfloat16 "
    "otherwise, and products are left to it",
)
TYPES = [torch.float32, pytest.param(torch.bfloat16, marks=not_in_bfloat16)]
SHAPES = [(64, 64), (960, 576), (100, 40), (40, 66), (576, 1536), (32, 2)]
"""Outputs and inputs: whole panels, and parts of one."""
ROWS = [1, 2, 3, 4, 5, 7, 16]


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=TYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def product(packed: Packed, fused: Fused) -> Chain:
    inputs = packed.weight.shape[1]
    assert packed.depth is not None
    op = Op(
        kind=OpKind.PRODUCT, heads=inputs, width=packed.width, depth=packed.depth,
        x=OpValue(0, 0, inputs), out=OpValue(1, 0, packed.width),
        weight=torch.ops.mkldnn.data_ptr(packed.weight),
        bias=None if packed.bias is None else packed.bias.data_ptr(),
    )  # fmt: skip
    out = BufferPlace(buffer=0, stride=packed.width, width=packed.width)
    return Chain(
        Plan(ops=[op], inputs=1, widths=[packed.width], outputs=[out], held=[packed]), fused
    )


def check_products(fused: Fused, dtype: torch.dtype, rows: Sequence[int]) -> None:
    for outputs, inputs in SHAPES:
        weight, bias = numbers(dtype, outputs, inputs), numbers(dtype, outputs)
        for bound in (None, bias):
            chain = product(pack([weight], [bound]), fused)
            x = numbers(dtype, 1, max(rows), inputs)
            exact = x.double() @ weight.double().T + (0 if bound is None else bound.double())
            size = x.double().abs() @ weight.double().abs().T
            allowed = exact.abs() * torch.finfo(dtype).eps / 2 + size * 2e-6
            for count in rows:
                (found,) = chain(x[:, :count])
                error = (found.double() - exact[:, :count]).abs()
                assert bool((error <= allowed[:, :count]).all()), (outputs, inputs, count)


def test_products_are_sums_rounded_once(dtype: torch.dtype) -> None:
    check_products(open_fused(dtype), dtype, ROWS)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the names are x86's")
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512"])
def test_older_processors(
    processor: str, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Without fused products of bfloat16, with narrower vectors, with none but the first."""
    needs = {"x86-64": "sse2", "haswell": "avx2", "skylake-avx512": "avx512bw"}[processor]
    if needs not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor has no {needs}")
    folder = tmp_path_factory.getbasetemp() / "older"
    check_products(Fused(open_library(built(SOURCE, folder, processor)), dtype), dtype, (1, 5))


def test_a_row_is_the_same_whatever_the_others_and_the_threads(dtype: torch.dtype) -> None:
    chain = product(pack([numbers(dtype, 960, 576)], [None]), open_fused(dtype))
    x = numbers(dtype, 1, 16, 576)
    together = chain(x)[0].clone()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in ROWS:
            assert torch.equal(chain(x[:, -count:])[0], together[:, -count:])


def test_weights_that_lie_otherwise_are_left_to_onednn(dtype: torch.dtype) -> None:
    weight = numbers(dtype, 96, 64)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    assert panel_depth(packed, weight) == 64
    assert panel_depth(packed, weight.flip(1)) is None
    assert panel_depth(packed, weight[:, :63]) is None
    other = weight.clone()
    other[95, 63] += 1
    assert panel_depth(packed, other) is None


class OwnValues:
    """Implements AttentionState: each token sees itself, so rows have nothing in common."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Scores
    ) -> torch.Tensor:
        group = query.shape[1] // value.shape[1]
        mixed = (
            value.repeat_interleave(group, 1) + 0.1 * query + 0.1 * key.repeat_interleave(group, 1)
        )
        return mixed.transpose(1, 2).contiguous()


@torch.inference_mode()
def logits(model: Model, begin: int, end: int) -> torch.Tensor:
    ids = torch.arange(begin, end)[None] * 37 % 500
    with attention_state(OwnValues()):
        return model.whole(ids, torch.arange(begin, end)[None], torch.arange(end - begin)).clone()


def plain_model(folder: Path, family: str, dtype: str) -> Model:
    path = random_checkpoint(folder / "model", family)
    return load_model(open_checkpoint(str(path)), device="cpu", dtype=dtype)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=not_in_bfloat16)])
def test_logits_of_a_row_are_the_same_in_any_batch(family: str, dtype: str, tmp_path: Path) -> None:
    model = compile_model(plain_model(tmp_path, family, dtype))
    assert model.own_tokens == FEW_TOKENS
    together = logits(model, 0, FEW_TOKENS)
    for begin, end in ((0, 1), (3, 5), (4, 9), (9, 16)):
        assert torch.equal(logits(model, begin, end), together[begin:end])


def test_where_panels_are_unknown_onednn_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "panel_depth", lambda *_: None)
    plain = plain_model(tmp_path, "llama", "float32")
    expected = logits(plain, 0, 3)
    model = compile_model(plain)
    assert model.own_tokens == 0
    torch.testing.assert_close(logits(model, 0, 3), expected, rtol=0, atol=1e-5)


def test_what_is_no_number_stays_so(dtype: torch.dtype) -> None:
    chain = product(pack([numbers(dtype, 64, 64)], [None]), open_fused(dtype))
    x = numbers(dtype, 1, 3, 64)
    x[0, 1, 5] = float("nan")
    assert chain(x)[0].isnan().all(dim=-1).tolist() == [[False, True, False]]


def test_chains_add_no_thread_to_those_of_torch(dtype: torch.dtype) -> None:
    chain = product(pack([numbers(dtype, 960, 576)], [None]), open_fused(dtype))
    torch.ones(1 << 20).add_(1)
    threads = {*os.listdir("/proc/self/task")}
    chain(numbers(dtype, 1, 16, 576))
    assert {*os.listdir("/proc/self/task")} <= threads
