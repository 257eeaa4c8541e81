"""Linear layers in FP8 on a CUDA device: the same rounding as on a CPU, a model near its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.compiled import fp8
from engine.core.options import CudaOptions
from engine.core.sizing import EngineLimits
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from engine.runner import Engine
from tests.drive import run_mixed, start
from tests.models import VOCAB_SIZE, random_checkpoint

pytestmark = pytest.mark.gpu
_WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [16, 100, 4096, 14_336, 20_000])
def test_rows_become_fp8_as_on_the_cpu(width: int, dtype: torch.dtype) -> None:
    rows = torch.randn(5, width, generator=torch.Generator().manual_seed(1))
    rows = (rows * torch.tensor([1e-6, 1e-3, 1.0, 1e4, 0.0])[:, None]).to(dtype)
    (values, scales), (own, own_scales) = fp8.to_fp8(rows.cuda()), fp8.to_fp8(rows)
    assert torch.equal(scales.cpu(), own_scales)
    assert torch.equal(values.cpu().float(), own.float())


@pytest.mark.parametrize("tokens", [1, 3, 17, 512])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (4096, 6144)])
def test_a_product_is_that_of_the_cpu(tokens: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    layer = fp8.Fp8Linear(torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs).bfloat16())
    x = torch.randn(1, tokens, inputs).bfloat16()
    rows, scales = fp8.to_fp8(x[0])
    exact = (rows.double() * scales) @ (layer.values.double() * layer.scales.T.double()).T
    found = layer.cuda()(x.cuda()).cpu().double()
    expected = exact + layer.bias.cpu().double()
    assert float((found[0] - expected).abs().max() / expected.abs().max()) < 0.01


def _engine(folder: Path, *, products: bool) -> Engine:
    return load_engine(
        open_checkpoint(str(folder)),
        device="cuda",
        dtype="bfloat16",
        block_size=16,
        blocks=64,
        limits=EngineLimits(max_model_len=128, prefill_chunk_tokens=32, max_running_requests=4),
        cuda=CudaOptions(fp8_products=products),
    )


def test_an_engine_in_fp8_loads_and_serves_by_recorded_steps(tmp_path: Path) -> None:
    """Loading compares its logits with the model's own."""
    folder = random_checkpoint(tmp_path, "llama", **_WIDE)
    engines = [_engine(folder, products=products) for products in (False, True)]
    ids = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, VOCAB_SIZE, (n,), generator=ids).tolist() for n in (5, 40, 70)]
    for engine in engines:
        sequences = start(engine, prompts, max_tokens=6)
        run_mixed(engine, sequences, chunk_tokens=32)
        assert [len(one.emitted) for one in sequences] == [6, 6, 6]
    plain, small = engines
    assert small.model.in_fp8 and small.graphs is not None
    assert small.model.weight_bytes < 0.9 * plain.model.weight_bytes
