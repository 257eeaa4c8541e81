"""The fused operations of a CUDA device, by the tests of the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from engine.compiled.triton.operations import TritonOperations
from tests.unit.test_fused import *  # noqa: F403

pytestmark = pytest.mark.gpu


class _OnDevice:
    """Takes and gives tensors of the CPU; strides stay."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        run = getattr(TritonOperations(), name)

        def moved(*args: object) -> object:
            there = tree_map_only(torch.Tensor, _strided, args)
            return tree_map_only(torch.Tensor, torch.Tensor.cpu, run(*there))

        return moved


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.untyped_storage().cuda()
    made = torch.empty(0, dtype=tensor.dtype, device="cuda")
    return made.set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())


@pytest.fixture
def fused() -> _OnDevice:
    return _OnDevice()
