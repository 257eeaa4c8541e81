"""Modules around a rank's share of another, which make of the ranks' outputs the whole one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from engine.parallel.group import Group

_LIBRARY = torch.library.Library("kvrelay", "FRAGMENT")
_LIBRARY.define("sum_of_ranks(Tensor part) -> Tensor")
_LIBRARY.define("joined_ranks(Tensor part, int size, int outputs) -> Tensor")
SUM = torch.ops.kvrelay.sum_of_ranks.default
JOIN = torch.ops.kvrelay.joined_ranks.default
"""Stand for a group's collectives where a forward pass is captured; never run."""


@torch.library.register_fake("kvrelay::sum_of_ranks", lib=_LIBRARY)
def _sum_shape(part: torch.Tensor) -> torch.Tensor:
    return part.new_empty(part.shape)


@torch.library.register_fake("kvrelay::joined_ranks", lib=_LIBRARY)
def _joined_shape(part: torch.Tensor, size: int, outputs: int) -> torch.Tensor:
    return part.new_empty(*part.shape[:-1], outputs)


class Summed(nn.Module):
    """Each rank has some of the inputs, so that the outputs are parts of a sum. The bias, if any,
    is added once."""

    def __init__(self, inner: nn.Module, group: Group, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.bias = bias
        self._group = group

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        part = self.inner(*args, **kwargs)
        whole: torch.Tensor = SUM(part) if type(part) is FakeTensor else self._group.sum(part)
        return whole if self.bias is None else whole + self.bias


class Joined(nn.Module):
    """Each rank has some of the outputs; `outputs` are all, without what fills the last share."""

    def __init__(self, inner: nn.Module, group: Group, outputs: int) -> None:
        super().__init__()
        self.inner = inner
        self._group = group
        self._outputs = outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self.inner(x)
        if type(part) is FakeTensor:
            joined: torch.Tensor = JOIN(part, self._group.size, self._outputs)
            return joined
        return self._group.join(part, self._outputs)
