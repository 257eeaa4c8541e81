"""Rotary embeddings keep their precision where products take TF32 (engine.matmul_precision: high).
Their angles are no products of matrices; ten bits of fraction would blur positions above 1,024."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from tests.models import FAMILIES, family_config

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
