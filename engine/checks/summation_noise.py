"""Measures how far rounding alone moves a model's logits: the same pass with its sums in another
order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

_SAFETY = 3.0
_ROUNDINGS = 4.0
"""Few logits may agree by chance: a bound is at least this many relative roundings."""
_NEGLIGIBLE = 1e-4
"""Nor is a bound below this, which matters to no token."""
_TF32_EPS = 2.0**-10


def noise_bound(run: Callable[[], torch.Tensor], expected: torch.Tensor) -> torch.Tensor:
    """The allowed distance of right logits from `expected`, as shares of its range; `[rows]`. `run`
    computes `expected` `[rows, vocab]` once more, in its own dtype."""
    with _HalvedSums():
        found = run()
    least = max(_NEGLIGIBLE, _ROUNDINGS * _rounding(found))
    return (_SAFETY * row_differences(found.float(), expected)).clamp_min(least)


def typical(differences: torch.Tensor, *, may_choose: bool, dtype: torch.dtype) -> float:
    """That of the worst row. With experts in 16 bits the median: near a tie other experts are
    chosen."""
    if may_choose and dtype != torch.float32:
        return float(differences.median())
    return float(differences.max())


def _rounding(logits: torch.Tensor) -> float:
    """The relative rounding of the products behind them."""
    shortened = logits.is_cuda and torch.get_float32_matmul_precision() != "highest"
    if logits.dtype == torch.float32 and shortened:
        return _TF32_EPS
    return torch.finfo(logits.dtype).eps


def row_differences(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of `[rows, vocab]`, as shares of the range of the expected logits."""
    spread = (expected.max() - expected.min()).clamp_min(1e-6)
    return (found - expected).abs().amax(dim=-1) / spread


class _HalvedSums(TorchFunctionMode):
    """Linear layers add the products of their inputs in two halves, as two ranks would."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is linear:
            return _halved(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _halved(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    half = weight.shape[1] // 2
    first = linear(input[..., :half], weight[:, :half], bias)
    return first + linear(input[..., half:], weight[:, half:])
