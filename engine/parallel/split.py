"""Finds one rank's share of a model, by the family's own tensor parallel plan.

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
from engine.model.weights import Cut, Cuts
from engine.parallel.stages import Skipped
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
    if not _splits_attention(module, plan):
        raise whole_attention(family)


def _splits_attention(module: Any, plan: Mapping[str, str]) -> bool:
    """An attention layer adds up what its ranks have; layers of experts may do so too."""
    named = [*module.named_modules()]
    layers = {name for name, one in named if hasattr(one, "layer_idx")}
    summed = (name for name, _ in named if plan.get(_pattern(name)) == "rowwise")
    return any(name.rpartition(".")[0] in layers for name in summed)


def whole_attention(family: str) -> ModelError:
    return ModelError(
        f"the {family} family can't be split over ranks: its plan leaves attention whole: set "
        "parallel.tensor to 1"
    )


def plan_cuts(module: Any, shard: Shard, kv_heads: Mapping[int, Sequence[int]]) -> Cuts:
    """The parts of a whole model's parameters that a rank reads. `kv_heads` are those of each
    layer's planes. Raises ModelError like `check_plan`, and for sizes that don't divide."""
    check_plan(module)
    plan = _plan(module)
    cutter = _Cutter(module.config.model_type, shard, _heads_by_name(module, kv_heads))
    for name, tensor in module.named_parameters():
        if style := plan.get(_pattern(name)):
            cutter.cut_parameter(name, tensor, style)
    for name, inner in module.named_modules():
        if (style := plan.get(_pattern(name))) in _CUT and not isinstance(inner, Skipped):
            cutter.cut_linear(name, inner, style)
    return cutter.cuts


def join_ranks(module: Any, group: Group, cuts: Cuts) -> None:
    """Wraps modules that hold this rank's parts, in place, so that the outputs of ranks are
    combined."""
    plan = _plan(module)
    for name, inner in [*module.named_modules()]:
        style = None if isinstance(inner, Skipped) else plan.get(_pattern(name))
        if style in _CUT:
            inner.out_features, inner.in_features = inner.weight.shape
        if style in _SUMMED:
            module.set_submodule(name, Summed(inner, group))
        elif style == "rowwise":
            bias = inner.bias
            inner.register_parameter("bias", None)
            module.set_submodule(name, Summed(inner, group, bias))
        elif style in _JOINED:
            outputs = cuts[f"{name}.weight"].whole
            module.set_submodule(name, JoinedOutputs(inner, group, outputs))


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
    def __init__(self, family: str, shard: Shard, kv_heads: Mapping[str, int]) -> None:
        self.cuts: dict[str, Cut] = {}
        self._family = family
        self._shard = shard
        self._kv_heads = kv_heads

    def cut_parameter(self, name: str, tensor: torch.Tensor, style: str) -> None:
        """A parameter without its own module, such as the joint weights of all experts."""
        match style:
            case "colwise":
                self.cuts[name] = self._share(name, tensor, max(0, tensor.ndim - 2))
            case "rowwise":
                self.cuts[name] = self._share(name, tensor, tensor.ndim - 1)
            case "packed_colwise":
                self.cuts[name] = self._packed_share(name, tensor, tensor.ndim - 2)

    def cut_linear(self, name: str, inner: nn.Module, style: str) -> None:
        if not isinstance(inner, nn.Linear):
            raise ModelError(
                f"the {self._family} family can't be split over ranks: {name} is a "
                f"{type(inner).__name__}: set parallel.tensor to 1"
            )
        if style == "rowwise":
            self.cuts[f"{name}.weight"] = self._share(name, inner.weight, 1)
            return
        share = self._padded_share if style in _JOINED else self._share
        share = self._packed_share if style == "packed_colwise" else share
        self.cuts[f"{name}.weight"] = share(name, inner.weight, 0)
        if inner.bias is not None:
            self.cuts[f"{name}.bias"] = share(name, inner.bias, 0)

    def _share(self, name: str, tensor: torch.Tensor, dim: int) -> Cut:
        whole, heads = tensor.shape[dim], self._kv_heads.get(name)
        if heads is not None:
            held, rows = self._shard.heads(heads), whole // heads
            part = range(held.start * rows, held.stop * rows)
        else:
            part = self._own(name, whole)
        return Cut(dim=dim, ranges=(part,), size=len(part), whole=whole)

    def _own(self, name: str, rows: int) -> range:
        rank, size = self._shard.rank, self._shard.size
        each, rest = divmod(rows, size)
        if rest:
            raise ModelError(
                f"parallel.tensor {size} can't split {name} of this {self._family} "
                f"model: it has {rows} rows or columns"
            )
        return range(rank * each, (rank + 1) * each)

    def _packed_share(self, name: str, tensor: torch.Tensor, dim: int) -> Cut:
        """The share of both halves, gate and up."""
        whole = tensor.shape[dim]
        gate = self._own(name, whole // 2)
        up = range(gate.start + whole // 2, gate.stop + whole // 2)
        return Cut(dim=dim, ranges=(gate, up), size=2 * len(gate), whole=whole)

    def _padded_share(self, name: str, tensor: torch.Tensor, dim: int) -> Cut:
        """Of the same size on all ranks; the last is padded with zeros, because vocabularies may be
        odd."""
        whole = tensor.shape[dim]
        each = -(-whole // self._shard.size)
        start, stop = (min(whole, (self._shard.rank + one) * each) for one in (0, 1))
        return Cut(dim=dim, ranges=(range(start, stop),), size=each, whole=whole)


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
