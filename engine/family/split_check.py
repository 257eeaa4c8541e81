"""Compares ranks that share a model with the whole model, in its first layers.

The first layers include one of each kind, and a model is split by kinds of layers. So no rank needs
the memory of the whole model: rank 0 loads the first layers, with the embeddings and the head, and
frees them before it loads its share.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.checks.self_check import Reference, eager_reference, short_token_ids
from engine.checks.summation_noise import row_differences, typical
from engine.device.host_memory import return_freed
from engine.device.stage import Stage
from engine.family.build import bare_copy, fill
from engine.family.long_check import keep_layers, small_copy
from engine.model.checkpoint import Checkpoint
from engine.model.families import has_experts, refusal
from engine.model.model import LOAD_ERRORS, Model
from engine.parallel.grid import Grid
from engine.parallel.stages import take_stage

CHECK = "split"
_LEAST_LAYERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLayers:
    """`reference`: the whole model's logits after its first `count` layers; None on ranks that only
    take part."""

    count: int
    reference: Reference | None


def first_layers(bare: Model, checkpoint: Checkpoint, *, is_leader: bool) -> FirstLayers:
    """Before weights are loaded: the memory that this takes is free again. Raises ModelError."""
    count = _count(bare)
    if not is_leader:
        return FirstLayers(count=count, reference=None)
    reference = eager_reference(fill(_first(bare, count), checkpoint))
    if bare.on_cpu:
        return_freed()
    else:
        torch.cuda.empty_cache()
    return FirstLayers(count=count, reference=reference)


def check_split(model: Model, first: FirstLayers) -> None:
    """All ranks call this at the same time, with their shares. Raises ModelError on rank 0."""
    with _only(model, first.count), _joined(model.stage):
        found = model.eager_logits(short_token_ids(model)).float()
    if first.reference is None:
        return
    rows = row_differences(found.flatten(0, 1), first.reference.logits.flatten(0, 1))
    worst = typical(rows, may_choose=has_experts(model.config), dtype=model.dtype)
    if not worst <= first.reference.bound:
        raise refusal(
            model.config.model_type,
            CHECK,
            f"the logits of its ranks differ from the whole model's by {worst:.2g} of their range "
            f"(allowed {first.reference.bound:.2g}): set parallel.tensor and parallel.pipeline to "
            "1",
        )


def _joined(stage: Stage | None) -> AbstractContextManager[None]:
    return nullcontext() if stage is None else stage.joined()


def _first(bare: Model, count: int) -> Model:
    config = copy.deepcopy(bare.config)
    try:
        keep_layers(config, range(count))
        return bare_copy(bare, config)
    except LOAD_ERRORS as error:
        reason = " ".join(str(error).split())
        kind = bare.config.model_type
        raise refusal(
            kind, CHECK, f"a model of its first layers can't be made: {reason}"
        ) from error


def _count(bare: Model) -> int:
    """The fewest layers that include one of each kind."""
    owner, name = _place(bare)
    layers = getattr(owner, name)
    named = getattr(bare.config, "layer_types", None) or [""] * len(layers)
    kinds = [
        (kind, tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()))
        for kind, layer in zip(named, layers, strict=True)
    ]
    needed = 1 + max(kinds.index(kind) for kind in set(kinds))
    return min(len(layers), max(_LEAST_LAYERS, needed))


_ALIKE = 1e-3


class _Handed:
    """Between two stages in this process, one after the other."""

    def __init__(self) -> None:
        self._hidden = torch.empty(0)

    def connect(self) -> None: ...

    def bound(self, timeout_s: float) -> None: ...

    def give_up(self) -> None: ...

    def close(self) -> None: ...

    def send(self, hidden: torch.Tensor) -> None:
        self._hidden = hidden

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._hidden


def check_stages_of_copy(bare: Model) -> None:
    """A small copy of the model must give the same logits in two stages, each with some of its
    layers. Raises ModelError for a family that changes hidden states outside its layers."""
    small, line = small_copy(bare, longest=0), _Handed()
    ids = short_token_ids(small)
    expected, found = small.eager_logits(ids), torch.empty(0)
    for index in range(2):
        layers = Grid(stages=2).layers(index, small.config.num_hidden_layers)
        stage = Stage(index, 2, layers, line)
        module = copy.deepcopy(small.module)
        take_stage(module, stage, small.dtype)
        with stage.joined():
            found = replace(small, module=module, stage=stage).eager_logits(ids)
    differences = row_differences(found.flatten(0, 1), expected.flatten(0, 1))
    if not float(differences.max()) <= _ALIKE:
        raise refusal(
            bare.config.model_type,
            "stages",
            f"in stages a small copy's logits differ by {float(differences.max()):.2g} of their "
            "range: set parallel.pipeline to 1",
        )


@contextmanager
def _only(model: Model, count: int) -> Iterator[None]:
    """In this context the model ends after its first `count` layers."""
    owner, name = _place(model)
    layers = getattr(owner, name)
    setattr(owner, name, layers[:count])
    try:
        yield
    finally:
        setattr(owner, name, layers)


def _place(model: Model) -> tuple[Any, str]:
    """Where the list of the layers is."""
    for owner in model.module.modules():
        for name, child in owner.named_children():
            if isinstance(child, torch.nn.ModuleList) and _are_layers(model, child):
                return owner, name
    raise refusal(model.config.model_type, CHECK, "its layers are in no list")


def _are_layers(model: Model, found: torch.nn.ModuleList) -> bool:
    counts = len(found) == model.config.num_hidden_layers
    return counts and any(hasattr(part, "layer_idx") for part in found.modules())
