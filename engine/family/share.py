"""Loads one rank's share of a model, and checks it against the whole.

No rank holds the whole model. Its layers are like those of a small copy; its logits are compared in
its first layers, which rank 0 loads whole for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.checks.self_check import Loaded, eager_reference
from engine.device.stage import Stage
from engine.family.build import bare_model, fill
from engine.family.long_check import check_long_sequences
from engine.family.masks import check_masks
from engine.family.split_check import FirstLayers, check_split, check_stages_of_copy, first_layers
from engine.family.startable import check_ranks, check_stages, kv_heads, whole_shapes
from engine.model.checkpoint import Checkpoint
from engine.model.families import refusal
from engine.model.kv_layout import LayerShape, probe
from engine.model.model import Model
from engine.parallel.opening import OwnRank
from engine.parallel.split import join_ranks, plan_cuts, whole_attention
from engine.parallel.stages import take_stage
from kvpool.core.layout.shards import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """`model` is this rank's part of a model. `whole`: the shapes of the whole model's layers,
    where this rank has only a part. `first`: what rank 0 knows of the whole model's first
    layers."""

    model: Model
    whole: dict[int, LayerShape] | None = None
    first: FirstLayers | None = None


def load_share(checkpoint: Checkpoint, *, device: str, dtype: str, own: OwnRank | None) -> Share:
    """Raises ModelError for a family, heads or layers that these degrees can't split."""
    bare = bare_model(checkpoint.path, device=device, dtype=dtype)
    if own is None:
        return Share(model=fill(bare, checkpoint))
    whole = whole_shapes(bare)
    check_ranks(bare, whole, own.grid.tensor)
    check_stages(bare, whole, own.grid.stages)
    if own.grid.stages > 1 and own.is_first:
        check_stages_of_copy(bare)
    first = first_layers(bare, checkpoint, is_leader=own.is_first)
    return Share(model=_part(bare, checkpoint, own, whole), whole=whole, first=first)


def _part(
    bare: Model, checkpoint: Checkpoint, own: OwnRank, whole: Mapping[int, LayerShape]
) -> Model:
    stage, group = _stage(bare, own), own.group
    if stage is not None:
        take_stage(bare.module, stage, bare.dtype)
    if group is None:
        return replace(fill(bare, checkpoint), stage=stage)
    shard = Shard(rank=group.rank, size=group.size)
    cuts = plan_cuts(bare.module, shard, kv_heads(whole))
    model = fill(bare, checkpoint, cuts)
    join_ranks(model.module, group, cuts)
    return replace(model, group=group, stage=stage)


def _stage(bare: Model, own: OwnRank) -> Stage | None:
    if own.line is None:
        return None
    index = own.grid.stage(own.rank)
    layers = own.grid.layers(index, bare.config.num_hidden_layers)
    return Stage(index, own.grid.stages, layers, own.line)


def check_share(share: Share, longest: int, own: OwnRank | None) -> Loaded:
    """`longest`: tokens of the longest sequence that will be served. All ranks call this at the
    same time. Raises ModelError for a family that would give wrong tokens."""
    model, shapes = share.model, probe(share.model)
    check_masks(model, shapes, longest)
    if own is None or own.is_first:
        check_long_sequences(model, longest)
    if share.whole is None:
        return Loaded(model=model, shapes=shapes, own=shapes, reference=eager_reference(model))
    assert own is not None and share.first is not None
    _check_own(model, shapes, share.whole, own.grid.shard(own.rank, None))
    _count_own_groups(model, shapes)
    check_split(model, share.first)
    return Loaded(model=model, shapes=share.whole, own=shapes, reference=eager_reference(model))


def _check_own(
    model: Model, own: dict[int, LayerShape], whole: dict[int, LayerShape], shard: Shard
) -> None:
    """Each layer that is here has its share of the heads; else it is as the whole model's."""
    heads = kv_heads(whole)
    for layer, shape in own.items():
        held = [plane.heads for plane in shape.planes]
        if held != [len(shard.heads(each)) for each in heads[layer]]:
            raise whole_attention(model.config.model_type)
        if _whole(shape, whole[layer]) != whole[layer]:
            raise refusal(
                model.config.model_type,
                "layers",
                f"layer {layer} has {shape}, and in a small copy {whole[layer]}",
            )


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
