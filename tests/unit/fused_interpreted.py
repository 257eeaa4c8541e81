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
from tests.unit.kernel_count import launched
from tests.unit.test_compiled import assert_near, cache, logits, plain_model, shared_cache
from tests.unit.test_fused import *  # noqa: F403

__all__ = ["cache", "shared_cache"]


@pytest.fixture
def dtype() -> torch.dtype:
    return torch.float32


@pytest.fixture
def fused() -> TritonOperations:
    return TritonOperations()


FULL = ("gemma3_text", "gpt_oss")
"""Of these each layer has a kind."""


def of_layers(folder: Path, family: str, layers: int) -> Model:
    kinds = {"layer_types": ["full_attention"] * layers} if family in FULL else {}
    return plain_model(folder, family, "bfloat16", num_hidden_layers=layers, **kinds)


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("llama", 38, 8),
        ("qwen3", 54, 10),
        ("gemma3_text", 82, 12),
        ("mixtral", 56, 26),
        ("qwen3_moe", 69, 26),
        ("gpt_oss", 65, 47),
    ],
)
def test_kernels_of_a_layer(
    family: str, before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, attention as one: what a second layer launches more."""
    monkeypatch.setattr(build, "_LENGTHS", (1, 5, 19))
    models = [of_layers(tmp_path / str(layers), family, layers) for layers in (1, 2)]
    one, two = (launched(model, monkeypatch) for model in models)
    assert (two - one).total() == before, two - one
    monkeypatch.setattr(Model, "on_cpu", property(lambda _: False))
    compiled = [build.compile_model(model) for model in models]
    assert all(model.flat is not None for model in compiled), "their logits are far off"
    one, two = (launched(model, monkeypatch) for model in compiled)
    assert (two - one).total() == after, two - one


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "mixtral", "gpt_oss"])
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
