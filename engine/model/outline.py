"""A model's tensors by name, without the code of its family: enough to run its recorded graph.

An outline is plain data. It says where each parameter's values are in the checkpoint; buffers that
no checkpoint has, such as the frequencies of rotary embeddings, are kept with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from engine.model.checkpoint import WeightFile
from engine.model.families import EXPERT_COUNTS
from engine.model.weights import WeightReader

_SETTINGS = (
    *("model_type", "vocab_size", "num_hidden_layers", "layer_types"),
    *("max_position_embeddings", *EXPERT_COUNTS),
)
"""Of the configuration, what is read after the model is built."""
_MOST_VALUES = 1 << 20


class NotOutlined(Exception):
    """The model has something that only the code of its family can make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """`sources`: # parameter or buffer |-> tensor of the checkpoint; `same`: # parameter |-> the
    one that it is tied to; `values`: buffers without a source."""

    settings: dict[str, Any]
    prefix: str
    head: str | None
    linears: list[str]
    dtypes: dict[str, str]
    buffers: list[str]
    sources: dict[str, str]
    same: dict[str, str]
    values: dict[str, torch.Tensor]

    def plain(self) -> dict[str, Any]:
        """For JSON: all but the values."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "values"}

    @property
    def config(self) -> Any:
        return SimpleNamespace(**self.settings)


class OutlinedModel(nn.Module):
    """Has the tensors of a transformers model under the same names, and no forward pass."""

    def __init__(self, outline: Outline) -> None:
        super().__init__()
        self.base_model_prefix = outline.prefix
        self._head, self._linears = outline.head, frozenset(outline.linears)

    def get_output_embeddings(self) -> nn.Module | None:
        return None if self._head is None else self.get_submodule(self._head)

    def put(self, name: str, tensor: torch.Tensor | nn.Parameter) -> None:
        path, _, key = name.rpartition(".")
        holder: nn.Module = self
        for depth, part in enumerate(path.split(".") if path else ()):
            at = ".".join(path.split(".")[: depth + 1])
            if part not in holder._modules:
                holder.add_module(part, _linear() if at in self._linears else nn.Module())
            holder = holder.get_submodule(part)
        if not isinstance(tensor, nn.Parameter):
            holder.register_buffer(key, tensor)
            return
        holder.register_parameter(key, tensor)
        if isinstance(holder, nn.Linear) and key == "weight":
            holder.out_features, holder.in_features = tensor.shape


def _linear() -> nn.Linear:
    return nn.Linear(1, 1, bias=False, device="meta")


def outline(
    module: Any, config: Any, linears: Iterable[nn.Module], sources: Mapping[str, str]
) -> Outline:
    """`sources`: # parameter or buffer |-> tensor of the checkpoint. Raises NotOutlined."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers())
    named = {id(part): name for name, part in module.named_modules()}
    first: dict[int, str] = {}
    same = {
        name: first[id(tensor)]
        for name, tensor in parameters.items()
        if first.setdefault(id(tensor), name) != name
    }
    lacking = sorted(set(parameters) - set(sources) - set(same))
    if lacking:
        raise NotOutlined(f"no tensor of the checkpoint is {lacking[0]}")
    values = {name: tensor for name, tensor in buffers.items() if name not in sources}
    if sum(tensor.numel() for tensor in values.values()) > _MOST_VALUES:
        raise NotOutlined(f"its buffers have more than {_MOST_VALUES} values")
    head = module.get_output_embeddings()
    whole = {**parameters, **buffers}
    return Outline(
        settings={name: getattr(config, name, None) for name in _SETTINGS},
        prefix=module.base_model_prefix,
        head=None if head is None else named[id(head)],
        linears=[named[id(one)] for one in linears],
        dtypes={name: str(tensor.dtype).removeprefix("torch.") for name, tensor in whole.items()},
        buffers=[*buffers],
        sources={name: sources[name] for name in whole if name in sources and name not in same},
        same=same,
        values=values,
    )


def filled(outline: Outline, files: Iterable[WeightFile], device: torch.device) -> OutlinedModel:
    """With its weights, read straight to `device`."""
    model, reader = OutlinedModel(outline), WeightReader(files, device)
    buffers, made = frozenset(outline.buffers), dict[str, torch.Tensor]()
    for name, dtype in outline.dtypes.items():
        if name in outline.same:
            found = made[outline.same[name]]
        elif name in outline.sources:
            found = reader.read(outline.sources[name], None).to(getattr(torch, dtype))
        else:
            found = outline.values[name].to(device)
        if name not in buffers and not isinstance(found, nn.Parameter):
            found = nn.Parameter(found, requires_grad=False)
        made[name] = found
        model.put(name, found)
    return model.eval()
