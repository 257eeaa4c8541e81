"""How many kernels a layer launches, with Triton interpreted on a CPU: run by `test_triton` in a
process of its own with TRITON_INTERPRET=1."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.compiled import build
from engine.model.model import Model
from tests.unit.kernel_count import launched
from tests.unit.test_compiled import cache, plain_model, shared_cache

__all__ = ["cache", "shared_cache"]

FULL = ("gemma3_text", "gpt_oss")
"""Of these each layer has a kind."""


def of_layers(folder: Path, family: str, layers: int) -> Model:
    kinds = {"layer_types": ["full_attention"] * layers} if family in FULL else {}
    return plain_model(folder, family, "bfloat16", num_hidden_layers=layers, **kinds)


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("llama", 38, 8),
        pytest.param("qwen3", 54, 10, marks=pytest.mark.long),
        ("gemma3_text", 82, 12),
        ("mixtral", 56, 26),
        pytest.param("qwen3_moe", 69, 26, marks=pytest.mark.long),
        ("gpt_oss", 65, 47),
    ],
)
def test_kernels_of_a_layer(
    family: str, before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, attention as one: what a second layer launches more."""
    monkeypatch.setattr(build, "_LENGTHS", (1, 2, 3))
    models = [of_layers(tmp_path / str(layers), family, layers) for layers in (1, 2)]
    one, two = (launched(model, monkeypatch) for model in models)
    assert (two - one).total() == before, two - one
    monkeypatch.setattr(Model, "on_cpu", property(lambda _: False))
    compiled = [build.compile_model(model) for model in models]
    assert all(model.flat is not None for model in compiled), "their logits are far off"
    one, two = (launched(model, monkeypatch) for model in compiled)
    assert (two - one).total() == after, two - one
