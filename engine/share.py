"""Cuts a whole model down to one rank's share, and first records the facts of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.core.sizing import MemoryProfile
from engine.device.group import Group
from engine.model.kv_layout import LayerShape, check_masks, probe
from engine.model.model import Model
from engine.parallel.split import check_degree, check_plan, split, whole_attention
from engine.self_check import Reference, check_long_sequences, eager_reference
from kvpool.core.layout.shards import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """`model` is this rank's share; the layers' `shapes` and the `reference` logits are those of
    the whole."""

    model: Model
    shapes: dict[int, LayerShape]
    reference: Reference

    @property
    def needs_masks(self) -> bool:
        return not all(shape.is_plain for shape in self.shapes.values())


def share_out(model: Model, group: Group | None, longest: int) -> Loaded:
    """`longest`: tokens of the longest sequence that will be served. Raises ModelError for a family
    that would give wrong tokens, or heads that this degree can't split."""
    if group is not None:
        check_plan(model.module)
    shapes = probe(model)
    check_masks(model, shapes, longest)
    check_long_sequences(model, longest)
    reference = eager_reference(model)
    if group is not None:
        _check_heads(model, shapes, group.size)
        split(model.module, group, _kv_heads(shapes))
        model = replace(model, group=group)
    return Loaded(model=model, shapes=shapes, reference=reference)


def check_shares(loaded: Loaded, group: Group | None) -> dict[int, LayerShape]:
    """The shapes of this rank's layers, which keep only its own heads. Raises ModelError."""
    if group is None:
        return loaded.shapes
    own = probe(loaded.model)
    shard = Shard(rank=group.rank, size=group.size)
    for layer, heads in _kv_heads(loaded.shapes).items():
        held = [plane.heads for plane in own[layer].planes]
        if held != [len(shard.heads(each)) for each in heads]:
            raise whole_attention(loaded.model.config.model_type)
    return own


def profile_of_all(
    profile: MemoryProfile, group: Group | None, *, on_cpu: bool = True
) -> MemoryProfile:
    """The profile of all ranks of one host, which are alike, from the measurement of one. On CPUs
    they share the memory, and the others' weights are loaded already; GPUs have their own."""
    if group is None:
        return profile
    taken = (group.size - 1) * profile.weight_bytes
    return replace(
        profile,
        total_bytes=profile.total_bytes + taken if on_cpu else group.size * profile.total_bytes,
        weight_bytes=group.size * profile.weight_bytes,
        activation_bytes=group.size * profile.activation_bytes,
        staging_bytes=group.size * profile.staging_bytes,
    )


def _kv_heads(shapes: Mapping[int, LayerShape]) -> dict[int, tuple[int, ...]]:
    return {layer: tuple(p.heads for p in shape.planes) for layer, shape in shapes.items()}


def _check_heads(model: Model, shapes: dict[int, LayerShape], size: int) -> None:
    heads = [shape.query_heads for shape in shapes.values()]
    kv_heads = [plane.heads for shape in shapes.values() for plane in shape.planes]
    check_degree(size, model.config.model_type, heads, kv_heads)
