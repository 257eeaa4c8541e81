"""Reads a checkpoint's weights, or one rank's part of them, straight to the device of a model.

Runs in the worker and in each of its ranks. The model was built on the meta device: its parameters
have shapes but no memory. transformers renames the checkpoint's tensors and joins some of them,
such as the weights of experts; here it gets only their parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from engine.model.checkpoint import WeightFile
from engine.model.weights import Cut, Cuts, WeightReader


@dataclass(frozen=True, slots=True)
class _Part:
    """What transformers takes for an entry of a state dict: indexing it reads the part."""

    reader: WeightReader
    name: str
    cut: Cut | None

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self.reader.read(self.name, self.cut)


@dataclass(frozen=True, slots=True)
class _Use:
    """A tensor of the checkpoint becomes the parameter or buffer `target`, or goes into it."""

    target: str
    converter: WeightConverter | None


def read_weights(
    module: Any, files: Iterable[WeightFile], device: torch.device, dtype: torch.dtype, cuts: Cuts
) -> set[str]:
    """Fills `module`, which is on the meta device. Returns the parameters that the files lack.

    Parameters that are tied to others, or are not made by joining tensors, are read whole and cut
    at the end.
    """
    reader = WeightReader(files, device)
    uses = _uses(module, reader.names)
    parts = _parts_before(uses, {n: c for n, c in cuts.items() if n not in _tied(module)})
    for name in {uses[one].target for one in parts}:
        whole = module.get_parameter(name)
        _replace(module, name, whole.new_empty(cuts[name].shape(whole.shape)))
    told = _load(module, {one: _Part(reader, one, parts.get(one)) for one in uses}, device, dtype)
    for name, cut in cuts.items():
        if cut.is_whole(found := module.get_parameter(name)):
            _replace(module, name, cut.of(found.detach()).clone())
    return set(told.missing_keys)


def plain_sources(module: Any, files: Iterable[WeightFile]) -> dict[str, str] | None:
    """# parameter or buffer |-> the tensor of the checkpoint that it is; None: some are made from
    several tensors, or from a part of one"""
    uses = _uses(module, [name for file in files for name in file.tensors])
    if any(use.converter is not None for use in uses.values()):
        return None
    return {use.target: name for name, use in uses.items()}


def _load(module: Any, entries: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """As `from_pretrained` does, which would need the package accelerate to load on a GPU."""
    config = LoadStateDictConfig(
        device_map={"": device},
        dtype=dtype,
        dtype_plan=module._get_dtype_plan(dtype),
        weight_mapping=get_model_conversion_mapping(module),
    )
    told, _ = convert_and_load_state_dict_in_model(module, entries, config)
    return module._finalize_model_loading(module, config, told)


def _tied(module: Any) -> set[str]:
    return set(module.all_tied_weights_keys)


def _uses(module: Any, names: Iterable[str]) -> dict[str, _Use]:
    """# tensor of the checkpoint |-> its use; tensors without a use are not read"""
    transforms = get_model_conversion_mapping(module)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    owners = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix, wanted = module.base_model_prefix, module.state_dict()
    found = {}
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if target in wanted:
            found[name] = _Use(target, owners[pattern] if pattern else None)
    return found


def _parts_before(uses: Mapping[str, _Use], cuts: Cuts) -> dict[str, Cut]:
    """# tensor of the checkpoint |-> the part that its parameter's part is made of"""
    found = {
        name: before(cuts[use.target], use.converter)
        for name, use in uses.items()
        if use.target in cuts
    }
    late = {uses[name].target for name, part in found.items() if part is None}
    return {
        name: part
        for name, part in found.items()
        if part is not None and uses[name].target not in late
    }


def before(cut: Cut, converter: WeightConverter | None) -> Cut | None:
    """The part of each of the tensors that `converter` joins to a parameter; None: it does more
    than join them."""
    if converter is None:
        return cut
    dim, joined = cut.dim, 1
    for operation in reversed(converter.operations):
        if type(operation) is Concatenate and not _joins_lists(operation):
            joined = len(converter.source_patterns) if operation.dim == cut.dim else 1
        elif type(operation) is MergeModulelist and operation.dim == 0 < dim:
            dim -= 1
        else:
            return None
    each, first = cut.whole // joined, cut.ranges[0]
    if cut.ranges != tuple(_moved(first, i * each) for i in range(joined)):
        return None
    return Cut(dim=dim, ranges=(first,), size=cut.size // joined, whole=each)


def _joins_lists(operation: Concatenate) -> bool:
    """Several tensors of one name, as many as the configuration says."""
    return getattr(operation, "num_shards_attribute", None) is not None


def _moved(one: range, rows: int) -> range:
    return range(one.start + rows, one.stop + rows)


def _replace(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, key = name.rpartition(".")
    holder = module.get_submodule(owner)
    holder.register_parameter(key, torch.nn.Parameter(tensor, requires_grad=False))
