"""Rotary embeddings keep their precision where products take TF32 (engine.matmul_precision: high).
Their angles are no products of matrices; ten bits of fraction would blur positions above 1,024. Not
run on a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from engine.core.options import CudaOptions
from engine.core.sizing import EngineLimits
from engine.load import load_engine, set_matmul_precision
from engine.model.checkpoint import open_checkpoint
from kvrelay.errors import ModelError
from tests.models import FAMILIES, family_config, random_checkpoint

_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.mv.default,
    torch.ops.aten.dot.default,
}


class NoProducts(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert func not in _PRODUCTS, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_angles_are_no_products_of_matrices(family: str) -> None:
    model = AutoModelForCausalLM.from_config(family_config(family))
    rotaries = [part for part in model.modules() if type(part).__name__.endswith("RotaryEmbedding")]
    positions, seen = torch.arange(2000, 2008)[None], 0
    for rotary in rotaries:
        for kind in getattr(rotary, "layer_types", None) or [None]:
            more = {} if kind is None else {"layer_type": kind}
            with NoProducts():
                cos, _ = rotary(torch.zeros(1, 8, 4), positions, **more)
            seen += cos.shape[-2] == 8
    assert seen


def test_a_product_would_be_found() -> None:
    with pytest.raises(AssertionError), NoProducts():
        torch.ones(2, 3) @ torch.ones(3, 2)


@pytest.fixture
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("older", ["5.17.0", "5.9.1", "4.57.3"])
def test_tf32_is_refused_with_a_transformers_that_multiplies_angles(
    older: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(str(random_checkpoint(tmp_path)))
    monkeypatch.setattr("transformers.__version__", older)
    with pytest.raises(ModelError, match=rf"transformers 5\.19 or later, and this is {older}"):
        load_engine(
            checkpoint,
            device="cuda",
            dtype="float32",
            block_size=16,
            blocks=4,
            limits=EngineLimits(max_model_len=64, prefill_chunk_tokens=64, max_running_requests=1),
            cuda=CudaOptions(tf32=True),
        )
    assert torch.get_float32_matmul_precision() == "highest"
    set_matmul_precision(tf32=False)


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("version", ["5.19.0", "5.20.0.dev0", "6.0.0"])
def test_tf32_is_taken_with_a_newer_one(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    set_matmul_precision(tf32=True)
    assert torch.get_float32_matmul_precision() == "high"
    set_matmul_precision(tf32=False)
    assert torch.get_float32_matmul_precision() == "highest"
