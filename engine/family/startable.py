"""Decides, before any weights are read, whether a model can be served, and by how many ranks and
stages.

A worker asks when it starts, and `kvrelay plan` of a model that may have only its configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from engine.family.build import bare_model
from engine.family.long_check import blank_copy
from engine.model.checkpoint import check_config
from engine.model.kv_layout import LayerShape, probe
from engine.model.model import Model
from engine.parallel.grid import Grid
from engine.parallel.split import check_degree, check_plan, plan_cuts
from engine.parallel.stages import check_cut
from kvpool.core.layout.shards import Shard
from kvrelay.errors import ModelError


def parallel_refusals(
    folder: Path, ranks: Collection[int], stages: Collection[int]
) -> tuple[dict[int, str], dict[int, str]]:
    """(# number of ranks, of `ranks` |-> why a worker can't start with so many, # number of stages,
    of `stages` |-> the same)

    Needs only the folder's config.json. Raises ModelError for a model that no worker can serve.
    """
    check_config(folder)
    bare = bare_model(folder, device="cpu", dtype="auto")
    whole = whole_shapes(bare)
    return (
        _refused(ranks, lambda count: check_ranks(bare, whole, count)),
        _refused(stages, lambda count: check_stages(bare, whole, count)),
    )


def _refused(counts: Collection[int], check: Callable[[int], None]) -> dict[int, str]:
    refusals = {}
    for count in counts:
        try:
            check(count)
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


def check_stages(bare: Model, whole: Mapping[int, LayerShape], count: int) -> None:
    """`whole`: as `whole_shapes` has them. Raises ModelError for a family or layers that can't be
    cut into so many stages."""
    if count == 1:
        return
    check_cut(bare.module, count)
    for stage in range(count):
        _check_kinds(bare, whole, stage, count)


def _check_kinds(bare: Model, whole: Mapping[int, LayerShape], stage: int, count: int) -> None:
    """A layer group has a block table on every stage, so it has layers there."""
    layers = Grid(stages=count).layers(stage, len(whole))
    here = {(whole[layer].planes, whole[layer].window) for layer in layers}
    for layer, shape in whole.items():
        if (shape.planes, shape.window) not in here:
            raise ModelError(
                f"parallel.pipeline {count}: stage {stage} of this {bare.config.model_type} model "
                f"would have no layer like layer {layer}, whose window is {shape.window}: choose "
                "fewer stages"
            )


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
