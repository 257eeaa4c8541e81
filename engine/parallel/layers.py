"""Modules around a rank's share of another, which make of the ranks' outputs the whole one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.parallel.group import Group


class Summed(nn.Module):
    """Each rank has some of the inputs, so that the outputs are parts of a sum. The bias, if any,
    is added once."""

    def __init__(self, inner: nn.Module, group: Group, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.bias = bias
        self._group = group

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        whole = self._group.sum(self.inner(*args, **kwargs))
        return whole if self.bias is None else whole + self.bias


class Joined(nn.Module):
    """Each rank has some of the outputs; `outputs` are all, without what fills the last share."""

    def __init__(self, inner: nn.Module, group: Group, outputs: int) -> None:
        super().__init__()
        self.inner = inner
        self._group = group
        self._outputs = outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.join(self.inner(x))[..., : self._outputs]
