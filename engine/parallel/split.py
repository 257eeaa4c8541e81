"""Keeps one rank's share of a loaded model, by the family's own tensor parallel plan.

The plan is transformers': # name pattern |-> how that linear layer or parameter is cut. Embeddings
stay whole on every rank. Modules around a rank's share combine the ranks' outputs. A model's heads
limit the possible degrees.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import gcd
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from engine.device.group import Group
from kvpool.core.layout.shards import Shard
from kvrelay.errors import ModelError

_LIBRARY = torch.library.Library("kvrelay", "FRAGMENT")
_LIBRARY.define("sum_of_ranks(Tensor part) -> Tensor")
_LIBRARY.define("joined_ranks(Tensor part, int size, int outputs) -> Tensor")
SUM = torch.ops.kvrelay.sum_of_ranks.default
JOIN = torch.ops.kvrelay.joined_ranks.default
"""Stand for a group's collectives in a captured forward pass; they never run."""


@torch.library.register_fake("kvrelay::sum_of_ranks", lib=_LIBRARY)
def _sum_shape(part: torch.Tensor) -> torch.Tensor:
    return part.new_empty(part.shape)


@torch.library.register_fake("kvrelay::joined_ranks", lib=_LIBRARY)
def _joined_shape(part: torch.Tensor, size: int, outputs: int) -> torch.Tensor:
    return part.new_empty(*part.shape[:-1], outputs)


class Summed(nn.Module):
    """Each rank has some of the inputs, so its outputs are parts of a sum. The bias, if any, is
    added once."""

    def __init__(self, inner: nn.Module, group: Group, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.bias = bias
        self._group = group

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        part = self.inner(*args, **kwargs)
        whole: torch.Tensor = SUM(part) if type(part) is FakeTensor else self._group.sum(part)
        return whole if self.bias is None else whole + self.bias


class JoinedOutputs(nn.Module):
    """Each rank has some of the outputs; `outputs` is their number without the padding of the last
    share."""

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


_CUT = {"colwise", "rowwise", "colwise_gather_output", "colwise_rep", "packed_colwise"}
_SUMMED = {"moe_tp_experts", "all_reduce"}
_WHOLE = {
    "replicate",
    "replicated_with_grad_allreduce",
    "embedding_rowwise",
    "embedding_colwise",
    "local_params",
    "mla_kv_a_proj",
}
_KNOWN = _CUT | _SUMMED | _WHOLE
_JOINED = {"colwise_gather_output", "colwise_rep"}
_KV = ("k_proj", "v_proj")
"""Of an attention layer, in the order of its planes."""


def check_plan(module: Any) -> None:
    """Raises ModelError for a family without a plan, or with one that can't be followed."""
    family, plan = module.config.model_type, _plan(module)
    if not plan:
        raise ModelError(
            f"the {family} family can't be split over ranks: transformers has no tensor parallel "
            "plan for it: set parallel.tensor to 1"
        )
    odd = sorted({style for style in plan.values() if style not in _KNOWN})
    if odd:
        raise ModelError(
            f"the {family} family can't be split over ranks: its plan asks for {', '.join(odd)}: "
            "set parallel.tensor to 1"
        )
    if "rowwise" not in plan.values():
        raise whole_attention(family)


def whole_attention(family: str) -> ModelError:
    return ModelError(
        f"the {family} family can't be split over ranks: its plan leaves attention whole: set "
        "parallel.tensor to 1"
    )


def split(module: Any, group: Group, kv_heads: Mapping[int, Sequence[int]]) -> None:
    """Works in place. `kv_heads` are those of each layer's planes. Raises ModelError like
    `check_plan`, and for sizes that don't divide."""
    check_plan(module)
    plan = _plan(module)
    cutter = _Cutter(module.config.model_type, group, _heads_by_name(module, kv_heads))
    for name, _ in [*module.named_parameters()]:
        if style := plan.get(_pattern(name)):
            cutter.cut_parameter(module, name, style)
    for name, inner in [*module.named_modules()]:
        if style := plan.get(_pattern(name)):
            cutter.cut_module(module, name, inner, style)


def _heads_by_name(module: Any, kv_heads: Mapping[int, Sequence[int]]) -> dict[str, int]:
    """# name of a linear layer for keys or values |-> their heads"""
    layers = [(name, m.layer_idx) for name, m in module.named_modules() if hasattr(m, "layer_idx")]
    return {
        f"{name}.{leaf}": heads
        for name, layer in layers
        for leaf, heads in zip(_KV, kv_heads[layer], strict=True)
    }


def _plan(module: Any) -> Mapping[str, str]:
    plan: Mapping[str, str] | None = module.tp_plan
    return plan or {}


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


class _Cutter:
    def __init__(self, family: str, group: Group, kv_heads: Mapping[str, int]) -> None:
        self._family = family
        self._group = group
        self._shard = Shard(rank=group.rank, size=group.size)
        self._kv_heads = kv_heads

    def cut_parameter(self, module: nn.Module, name: str, style: str) -> None:
        """A parameter without its own module, such as the joint weights of all experts."""
        owner, _, key = name.rpartition(".")
        holder = module.get_submodule(owner)
        tensor = holder.get_parameter(key)
        match style:
            case "colwise":
                found = self._share(name, tensor, max(0, tensor.ndim - 2))
            case "rowwise":
                found = self._share(name, tensor, tensor.ndim - 1)
            case "packed_colwise":
                found = self._packed_share(name, tensor, tensor.ndim - 2)
            case _:
                return
        holder.register_parameter(key, _frozen(found))

    def cut_module(self, module: nn.Module, name: str, inner: nn.Module, style: str) -> None:
        if style in _SUMMED:
            module.set_submodule(name, Summed(inner, self._group))
        elif style in _CUT:
            if not isinstance(inner, nn.Linear):
                raise ModelError(
                    f"the {self._family} family can't be split over ranks: {name} is a "
                    f"{type(inner).__name__}: set parallel.tensor to 1"
                )
            module.set_submodule(name, self._linear(name, inner, style))

    def _linear(self, name: str, inner: nn.Linear, style: str) -> nn.Module:
        outputs = inner.out_features
        match style:
            case "rowwise":
                bias = inner.bias
                inner.register_parameter("bias", None)
                self._set(inner, self._share(name, inner.weight, 1))
                return Summed(inner, self._group, bias)
            case "packed_colwise":
                self._set(inner, self._packed_share(name, inner.weight, 0))
                if inner.bias is not None:
                    inner.bias = _frozen(self._packed_share(name, inner.bias, 0))
                return inner
        share = self._padded_share if style in _JOINED else self._share
        self._set(inner, share(name, inner.weight, 0))
        if inner.bias is not None:
            inner.bias = _frozen(share(name, inner.bias, 0))
        return JoinedOutputs(inner, self._group, outputs) if style in _JOINED else inner

    def _set(self, linear: nn.Linear, weight: torch.Tensor) -> None:
        linear.weight = _frozen(weight)
        linear.out_features, linear.in_features = weight.shape

    def _share(self, name: str, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """A copy, so that the whole can be freed."""
        heads = self._kv_heads.get(name)
        if heads is not None:
            held, rows = self._shard.heads(heads), tensor.shape[dim] // heads
            return tensor.narrow(dim, held.start * rows, len(held) * rows).clone()
        each, rest = divmod(tensor.shape[dim], self._group.size)
        if rest:
            raise ModelError(
                f"parallel.tensor {self._group.size} can't split {name} of this {self._family} "
                f"model: it has {tensor.shape[dim]} rows or columns"
            )
        return tensor.narrow(dim, self._group.rank * each, each).clone()

    def _packed_share(self, name: str, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The share of both halves, gate and up."""
        halves = tensor.chunk(2, dim=dim)
        return torch.cat([self._share(name, half, dim) for half in halves], dim=dim)

    def _padded_share(self, name: str, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Of the same size on all ranks; the last is padded with zeros, because vocabularies may be
        odd."""
        assert dim == 0, name
        each = -(-len(tensor) // self._group.size)
        share = tensor[self._group.rank * each : (self._group.rank + 1) * each]
        padded = tensor.new_zeros(each, *tensor.shape[1:])
        padded[: len(share)] = share
        return padded


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def check_degree(size: int, family: str, heads: Collection[int], kv_heads: Collection[int]) -> None:
    """`heads`, `kv_heads`: of any layer. Raises ModelError that names the possible degrees."""
    if _allows(size, heads, kv_heads):
        return
    possible = [str(n) for n in range(1, gcd(*heads) + 1) if _allows(n, heads, kv_heads)]
    raise ModelError(
        f"parallel.tensor {size} can't split the heads of this {family} model, which has "
        f"{_spelled(heads)} and {_spelled(kv_heads)} for KV: choose {' or '.join(possible)}"
    )


def _allows(size: int, heads: Collection[int], kv_heads: Collection[int]) -> bool:
    """A KV head may be on several ranks; these then have no other KV head."""
    shared = all(count % size == 0 or size % count == 0 for count in kv_heads)
    return shared and all(count % size == 0 for count in heads)


def _spelled(counts: Collection[int]) -> str:
    return " or ".join(str(count) for count in sorted(set(counts)))
