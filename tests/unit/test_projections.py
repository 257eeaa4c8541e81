"""Projections of one input are one product, and the model says what it said. What CUDA devices do,
on a CPU."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from engine.compiled import build, merging
from engine.compiled.merging import MergedLinear, merge_projections
from engine.model.model import Model
from tests.models import FAMILIES
from tests.unit.test_compiled import FAR, all_logits, assert_near, logits, plain_model


def merged(model: Model) -> int:
    return merge_projections(model.module, lambda: logits(model, 5))


def widths(model: Model) -> list[int]:
    products = {
        id(m.product): m.product for m in model.module.modules() if isinstance(m, MergedLinear)
    }
    return [one.width for one in products.values()]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_stay(family: str, tmp_path: Path) -> None:
    model = plain_model(tmp_path, family)
    expected, nbytes = all_logits(model), model.weight_bytes
    found = merged(model)
    assert found == len(widths(model))
    assert_near(all_logits(model), expected, FAR["float32"])
    assert model.weight_bytes == nbytes


def test_queries_keys_and_values_and_gates_are_merged(tmp_path: Path) -> None:
    model = plain_model(tmp_path, "qwen2")  # with biases
    assert merged(model) == 4
    assert widths(model) == [64 + 2 * 32, 2 * 96] * 2
    held = [m.product._last for m in model.module.modules() if isinstance(m, MergedLinear)]
    assert held == [None] * 10, "no activations are kept"


def test_old_weights_go_one_product_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain_model(tmp_path)
    linears = [m for m in model.module.modules() if isinstance(m, torch.nn.Linear)]
    layers = [weakref.ref(one.weight) for one in linears if one.out_features != 64][:-1]
    del linears
    most: list[int] = []

    class Watched(merging._Product):
        def __init__(self, linear: torch.nn.Linear) -> None:
            most.append(sum(one() is not None for one in layers))
            super().__init__(linear)

    monkeypatch.setattr(merging, "_Product", Watched)
    gc.disable()
    try:
        merged(model)
        assert [one() is not None for one in layers] == [False] * len(layers)
    finally:
        gc.enable()
    assert most == sorted(most, reverse=True) and most[-1] < most[0]


def test_an_input_that_another_thread_brings_is_computed_anew(tmp_path: Path) -> None:
    model = plain_model(tmp_path)
    merged(model)
    query, key, value = (
        getattr(model.module.model.layers[0].self_attn, f"{name}_proj") for name in "qkv"
    )
    one, other = torch.randn(2, 64), torch.randn(2, 64)
    expected = key(one), value(other)
    query(one)
    query(other)
    assert torch.equal(key(one), expected[0])
    assert torch.equal(value(other), expected[1])


def test_models_of_other_devices_are_merged_when_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain_model(tmp_path)
    monkeypatch.setattr(Model, "on_cpu", property(lambda _: False))
    assert build.compile_model(model) is model
    assert len(widths(model)) == 4
