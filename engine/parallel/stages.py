"""Cuts a model into stages: each has consecutive layers, the first one the embeddings, the last one
the norm and the head.

Modules of other stages are replaced, by transformers' own pipeline plan of the family: embeddings
by the hidden states that come in, the norm by those that go out, layers and head by nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from engine.device.stage import Stage
from engine.model.families import longrope_border_tokens
from kvrelay.errors import ModelError

_LIBRARY = torch.library.Library("kvrelay", "FRAGMENT")
_LIBRARY.define("received(Tensor ids, int hidden, ScalarType dtype) -> Tensor")
_LIBRARY.define("sent(Tensor hidden) -> Tensor")
RECEIVED = torch.ops.kvrelay.received.default
SENT = torch.ops.kvrelay.sent.default
"""Stand for a stage's ends in a captured forward pass; they never run."""


@torch.library.register_fake("kvrelay::received", lib=_LIBRARY)
def _received_shape(ids: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return ids.new_empty(*ids.shape, hidden, dtype=dtype)


@torch.library.register_fake("kvrelay::sent", lib=_LIBRARY)
def _sent_shape(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


class _Received(nn.Module):
    """In place of embeddings. `weight`: theirs, where the head is tied to it."""

    def __init__(self, stage: Stage, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._stage, self._hidden, self._dtype = stage, hidden, dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if type(ids) is FakeTensor:
            found: torch.Tensor = RECEIVED(ids, self._hidden, self._dtype)
            return found
        return self._stage.receive(ids, self._hidden, self._dtype)


class _Sent(nn.Module):
    """In place of the norm."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if type(hidden) is FakeTensor:
            found: torch.Tensor = SENT(hidden)
            return found
        return self._stage.send(hidden)


class Skipped(nn.Module):
    """In place of a layer or the head."""

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden


def check_cut(module: Any, count: int) -> None:
    """Raises ModelError for a family or a model that has no such stages."""
    family, layers = module.config.model_type, module.config.num_hidden_layers
    if not _plan(module):
        raise ModelError(
            f"the {family} family can't be cut into stages: transformers has no pipeline plan for "
            "it: set parallel.pipeline to 1"
        )
    if longrope_border_tokens(module.config) is not None:
        raise ModelError(
            f"the {family} family can't be cut into stages: LongRoPE treats short and long "
            "sequences in separate passes: set parallel.pipeline to 1"
        )
    if count > layers:
        raise ModelError(
            f"parallel.pipeline {count}: this {family} model has {layers} layers: choose at most "
            "as many"
        )


def take_stage(module: Any, stage: Stage, dtype: torch.dtype) -> None:
    """Replaces what other stages have, in place, before weights are read."""
    base = module.base_model
    names = [*_plan(module)]
    layers = getattr(base, _layers_name(module))
    for i in set(range(len(layers))) - set(stage.layers):
        layers[i] = Skipped()
    if not stage.is_first:
        embeddings = module.get_input_embeddings()
        received = _Received(stage, module.config.hidden_size, dtype)
        if stage.is_last and module.all_tied_weights_keys:
            received.weight = embeddings.weight
        _replace(base, embeddings, received)
    if not stage.is_last:
        setattr(base, names[-1], _Sent(stage))
        _replace(module, module.get_output_embeddings(), Skipped())
        module.all_tied_weights_keys = {}


def _plan(module: Any) -> dict[str, Any]:
    plan: dict[str, Any] | None = getattr(module.config, "base_model_pp_plan", None)
    return plan or {}


def _layers_name(module: Any) -> str:
    """The plan's only list."""
    base = module.base_model
    return next(one for one in _plan(module) if isinstance(getattr(base, one), nn.ModuleList))


def _replace(owner: Any, old: nn.Module, new: nn.Module) -> None:
    name = next(name for name, one in owner.named_modules() if one is old)
    owner.set_submodule(name, new)
