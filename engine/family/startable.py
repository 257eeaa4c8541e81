"""Decides, before any weights are read, whether a model can be served, and by how many ranks.

A worker asks when it starts, and `kvrelay plan` of a model that may have only its configuration.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from engine.family.build import bare_model
from engine.family.long_check import blank_copy
from engine.model.checkpoint import check_config
from engine.model.kv_layout import LayerShape, probe
from engine.model.model import Model
from engine.parallel.split import check_degree, check_plan, plan_cuts
from kvpool.core.layout.shards import Shard
from kvrelay.errors import ModelError


def rank_refusals(folder: Path, counts: Collection[int]) -> dict[int, str]:
    """# number of ranks, of `counts` |-> why a worker can't start with so many

    Needs only the folder's config.json. Raises ModelError for a model that no worker can serve.
    """
    check_config(folder)
    bare = bare_model(folder, device="cpu", dtype="auto")
    whole, refusals = whole_shapes(bare), {}
    for count in counts:
        try:
            check_ranks(bare, whole, count)
        except ModelError as error:
            refusals[count] = str(error)
    return refusals


def check_ranks(bare: Model, whole: Mapping[int, LayerShape], count: int) -> None:
    """`whole`: as `whole_shapes` has them. Raises ModelError for a family, heads or layers that so
    many ranks can't share."""
    if count == 1:
        return
    check_plan(bare.module)
    heads = [shape.query_heads for shape in whole.values()]
    planes = [plane.heads for shape in whole.values() for plane in shape.planes]
    check_degree(count, bare.config.model_type, heads, planes)
    plan_cuts(bare.module, Shard(rank=0, size=count), kv_heads(whole))


def whole_shapes(bare: Model) -> dict[int, LayerShape]:
    """# layer |-> a layer of its kind in a small copy, which has as many heads, and its window

    Raises ModelError for a family whose layers can't be served.
    """
    small = blank_copy(bare)
    of_kind = dict(zip(_kinds(small), probe(small).values(), strict=True))
    return {layer: of_kind[kind] for layer, kind in enumerate(_kinds(bare))}


def kv_heads(shapes: Mapping[int, LayerShape]) -> dict[int, tuple[int, ...]]:
    """# layer |-> the heads of its planes"""
    return {layer: tuple(p.heads for p in shape.planes) for layer, shape in shapes.items()}


def _kinds(model: Model) -> list[str]:
    count = model.config.num_hidden_layers
    return getattr(model.config, "layer_types", None) or ["full_attention"] * count
