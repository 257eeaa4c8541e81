"""The device's fused operations, interpreted on a CPU: run by `test_triton` in a process of its own
with TRITON_INTERPRET=1. Triton's interpreter cuts bfloat16 off where a device rounds it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.compiled import build, fp8
from engine.compiled.triton.fp8 import rows_to_fp8
from engine.compiled.triton.operations import TritonOperations
from engine.model.model import Model
from tests.unit.test_compiled import assert_near, cache, logits, plain_model, shared_cache
from tests.unit.test_fused import *  # noqa: F403

__all__ = ["cache", "shared_cache"]


@pytest.fixture
def dtype() -> torch.dtype:
    return torch.float32


@pytest.fixture(params=[1, 5])
def tokens(request: pytest.FixtureRequest) -> int:
    """Each is a program of its own."""
    found: int = request.param
    return found


@pytest.fixture
def fused() -> TritonOperations:
    return TritonOperations()


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "mixtral"])
def test_a_device_s_graph_is_the_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_LENGTHS", (1, 5, 19))
    model = plain_model(tmp_path, family)
    expected, nbytes = [logits(model, 7)], model.weight_bytes
    monkeypatch.setattr(Model, "on_cpu", property(lambda _: False))
    compiled = build.compile_model(model)
    assert compiled.flat is not None
    assert_near([logits(compiled, 7)], expected, 1e-5)
    assert_near([logits(model, 7)], expected, 1e-5)
    assert compiled.weight_bytes == nbytes


@pytest.mark.parametrize("width", [16, 100, 20_000])
def test_rows_become_fp8_as_on_the_cpu(width: int) -> None:
    rows = torch.randn(3, width, generator=torch.Generator().manual_seed(1))
    rows = torch.cat([rows * torch.tensor([[1e-3], [1.0], [1e4]]), torch.zeros(1, width)])
    (values, scales), (own, own_scales) = rows_to_fp8(rows), fp8.to_fp8(rows)
    assert torch.equal(scales, own_scales)
    has_fraction = torch.frexp(own.float()).mantissa.abs() != 0.5
    same = values.float() == own.float()
    share = float(same[has_fraction].float().mean())
    assert share > 0.99, "the interpreter errs at powers of two, and at ties"
    assert float(has_fraction.float().mean()) > 0.5
