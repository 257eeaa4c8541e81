"""Loads one rank's share of a model, and checks it against the whole.

No rank holds the whole model. Its heads are those of a small copy; its logits are compared in its
first layers, which rank 0 loads whole for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.core.sizing import MemoryProfile
from engine.device.group import Group
from engine.model.checkpoint import Checkpoint
from engine.model.kv_layout import LayerShape, check_masks, probe
from engine.model.model import Model, bare_model, fill
from engine.parallel.split import check_degree, check_plan, join_ranks, plan_cuts, whole_attention
from engine.self_check import Reference, check_long_sequences, eager_reference, small_copy
from engine.split_check import FirstLayers, check_split, first_layers
from kvpool.core.layout.shards import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """`model` is this rank's part of a model. `whole`: the shapes of the whole model's layers,
    where a rank has only a part. `first`: what rank 0 knows of the whole model's first layers."""

    model: Model
    whole: dict[int, LayerShape] | None = None
    first: FirstLayers | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The layers' `shapes` are those of the whole model, `own` those of this rank, which keep only
    its heads. The `reference` logits are of the model's own attention."""

    model: Model
    shapes: dict[int, LayerShape]
    own: dict[int, LayerShape]
    reference: Reference

    @property
    def needs_masks(self) -> bool:
        return not all(shape.is_plain for shape in self.shapes.values())


def load_share(
    checkpoint: Checkpoint, *, device: str, dtype: str, group: Group | None, longest: int
) -> Share:
    """`longest`: tokens of the longest sequence that will be served. Raises ModelError for a family
    or for heads that this degree can't split."""
    bare = bare_model(checkpoint, device=device, dtype=dtype)
    if group is None:
        return Share(model=fill(bare, checkpoint))
    check_plan(bare.module)
    heads = _heads(bare, longest)
    _check_heads(bare, heads, group.size)
    first = first_layers(bare, checkpoint, is_leader=group.rank == 0)
    cuts = plan_cuts(bare.module, group, _kv_heads(heads))
    model = fill(bare, checkpoint, cuts)
    join_ranks(model.module, group, cuts)
    return Share(model=replace(model, group=group), whole=heads, first=first)


def check_share(share: Share, longest: int) -> Loaded:
    """All ranks call this at the same time. Raises ModelError for a family that would give wrong
    tokens."""
    model, group = share.model, share.model.group
    own = probe(model)
    check_masks(model, own, longest)
    if group is None or group.rank == 0:
        check_long_sequences(model, longest)
    if share.whole is None:
        return Loaded(model=model, shapes=own, own=own, reference=eager_reference(model))
    assert group is not None and share.first is not None
    _check_own(model, own, share.whole, group)
    _count_own_groups(model, own)
    check_split(model, share.first)
    shapes = {layer: _whole(shape, share.whole[layer]) for layer, shape in own.items()}
    return Loaded(model=model, shapes=shapes, own=own, reference=eager_reference(model))


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


def _heads(bare: Model, longest: int) -> dict[int, LayerShape]:
    """# layer |-> a layer of its kind in a small copy, which has as many heads"""
    small = small_copy(bare, longest)
    of_kind = dict(zip(_kinds(small), probe(small).values(), strict=True))
    return {layer: of_kind[kind] for layer, kind in enumerate(_kinds(bare))}


def _kinds(model: Model) -> list[str]:
    count = model.config.num_hidden_layers
    return getattr(model.config, "layer_types", None) or ["full_attention"] * count


def _kv_heads(shapes: Mapping[int, LayerShape]) -> dict[int, tuple[int, ...]]:
    return {layer: tuple(p.heads for p in shape.planes) for layer, shape in shapes.items()}


def _check_heads(model: Model, shapes: dict[int, LayerShape], size: int) -> None:
    heads = [shape.query_heads for shape in shapes.values()]
    kv_heads = [plane.heads for shape in shapes.values() for plane in shape.planes]
    check_degree(size, model.config.model_type, heads, kv_heads)


def _check_own(
    model: Model, own: dict[int, LayerShape], whole: dict[int, LayerShape], group: Group
) -> None:
    shard = Shard(rank=group.rank, size=group.size)
    for layer, heads in _kv_heads(whole).items():
        held = [plane.heads for plane in own[layer].planes]
        if held != [len(shard.heads(each)) for each in heads]:
            raise whole_attention(model.config.model_type)


def _count_own_groups(model: Model, own: dict[int, LayerShape]) -> None:
    """transformers' own attention repeats each KV head this many times. On a rank it may be fewer,
    because other ranks have the same KV head."""
    for module in model.module.modules():
        if hasattr(module, "num_key_value_groups"):
            shape = own[module.layer_idx]
            module.num_key_value_groups = shape.query_heads // shape.planes[0].heads


def _whole(own: LayerShape, whole: LayerShape) -> LayerShape:
    planes = (
        replace(plane, heads=other.heads)
        for plane, other in zip(own.planes, whole.planes, strict=True)
    )
    return replace(own, planes=tuple(planes), query_heads=whole.query_heads)
