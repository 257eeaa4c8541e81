"""How many kernels a layer launches, without a device: a dispatch mode counts torch's operations
but views and allocations, and each launch of a Triton kernel. Attention counts as one, with the
rotation and the storing of KV that it does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from engine.compiled.triton import operations
from engine.model.interface import Scores, attention_state
from engine.model.model import Model

_NO_KERNEL = {"empty", "new_empty", "empty_like", "attention"}  # the last one counts itself
_TRITON = ("norm_rows", "rotate_heads", "gate_rows")


class Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if name not in _NO_KERNEL and not (func.is_view and _shares(result, args[0])):
            self.found[name] += 1
        return result


def _shares(result: Any, source: torch.Tensor) -> bool:
    """`to` and `reshape` may be views or copies."""
    first = result if isinstance(result, torch.Tensor) else result[0]
    return bool(first.untyped_storage().data_ptr() == source.untyped_storage().data_ptr())


class _Launches:
    """In the place of a Triton kernel."""

    def __init__(self, kernels: Kernels, name: str) -> None:
        self._kernels, self._name = kernels, name
        self._kernel = getattr(operations, name)

    def __getitem__(self, grid: Any) -> Any:
        def launched(*args: Any, **kwargs: Any) -> None:
            self._kernels.found[self._name] += 1
            with _disable_current_modes():
                self._kernel[grid](*args, **kwargs)

        return launched


class _Attention:
    """As the Triton backend's: it also rotates and stores."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def attend(self, layer: int, query: Any, key: Any, value: Any, scores: Scores) -> Any:
        self._kernels.found["attention"] += 1
        with _disable_current_modes():
            return torch.zeros_like(query).transpose(1, 2).contiguous()

    def attend_rotating(
        self, layer: int, query: Any, key: Any, value: Any, cos: Any, sin: Any, scores: Scores
    ) -> Any:
        return self.attend(layer, query, key, value, scores)


@torch.inference_mode()
def launched(model: Model, monkeypatch: pytest.MonkeyPatch, tokens: int = 3) -> Counter[str]:
    kernels = Kernels()
    ids, places = torch.arange(tokens)[None], torch.arange(tokens)[None]
    with monkeypatch.context() as patch:
        for name in _TRITON:
            patch.setattr(operations, name, _Launches(kernels, name))
        with attention_state(_Attention(kernels)), kernels:
            model.whole(ids, places, torch.arange(tokens))
    return kernels.found
