"""Derives the KV layout from one forward pass of the model's attention layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.model.families import refusal
from engine.model.interface import Scores
from engine.model.model import LOAD_ERRORS, Model
from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane

_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One attention layer: the KV that it keeps per token, its window, and its scores."""

    planes: tuple[Plane, ...]
    window: int | None
    query_heads: int
    has_softcap: bool
    has_sinks: bool

    @property
    def is_plain(self) -> bool:
        return not (self.has_softcap or self.has_sinks)


@dataclass(slots=True)
class ShapeRecorder:
    kind: str
    shapes: dict[int, LayerShape] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        if layer in self.shapes:
            raise refusal(self.kind, "single call", f"layer {layer} calls attention twice")
        planes = (
            Plane(name="k", heads=key.shape[1], dim=key.shape[3]),
            Plane(name="v", heads=value.shape[1], dim=value.shape[3]),
        )
        self.shapes[layer] = LayerShape(
            planes=planes,
            window=scores.window,
            query_heads=query.shape[1],
            has_softcap=scores.softcap is not None,
            has_sinks=scores.sinks is not None,
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def probe(model: Model) -> dict[int, LayerShape]:
    """# layer |-> its shape. Raises ModelError when the family hides layers or their windows, or
    needs more than causal attention."""
    recorder = ShapeRecorder(model.config.model_type)
    run_probe(model, recorder)
    _check_layers(model, recorder.shapes)
    return recorder.shapes


def run_probe(model: Model, recorder: ShapeRecorder) -> None:
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device=model.device)
    positions = torch.arange(_TOKENS, device=model.device)
    try:
        model.forward(ids, positions[None], positions, recorder)
    except torch.OutOfMemoryError:
        raise
    except LOAD_ERRORS as error:
        reason = f"it fails by itself: {' '.join(str(error).split())}"
        raise refusal(recorder.kind, "forward", reason) from error


def _check_layers(model: Model, shapes: dict[int, LayerShape]) -> None:
    config = model.config
    if sorted(shapes) != list(model.layers):
        raise refusal(
            config.model_type,
            "layers",
            f"attention reached the interface in layers {sorted(shapes)} of {[*model.layers]}",
        )
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if layer not in shapes:
            continue
        if (kind == "sliding_attention") != (shapes[layer].window is not None):
            raise refusal(
                config.model_type,
                "layers",
                f"layer {layer} is {kind} but its attention was called with a window of "
                f"{shapes[layer].window}",
            )


def derive_layout(shapes: dict[int, LayerShape], *, dtype: str, block_size: int) -> KvLayout:
    """Layers of equal span and planes share a group; groups are in the order of their first
    layer."""
    members: dict[tuple[tuple[Plane, ...], int | None], list[int]] = {}
    for layer, shape in sorted(shapes.items()):
        members.setdefault((shape.planes, shape.window), []).append(layer)
    groups = tuple(
        LayerGroup(layers=tuple(layers), planes=planes, window=window)
        for (planes, window), layers in members.items()
    )
    return KvLayout(groups=groups, dtype=dtype, block_size=block_size)


def layer_places(layout: KvLayout) -> dict[int, tuple[int, int]]:
    """# layer |-> (layer group, index in it)"""
    return {
        layer: (g, i)
        for g, group in enumerate(layout.groups)
        for i, layer in enumerate(group.layers)
    }
