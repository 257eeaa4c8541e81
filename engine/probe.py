"""Derives the KV layout from what the model's attention layers really do with one token."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.attention import Scores
from engine.model import Model
from kvpool.layout import KvLayout, LayerGroup, Plane
from kvrelay.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What one attention layer keeps per token, how far it looks back, and how it scores."""

    planes: tuple[Plane, ...]
    window: int | None
    query_heads: int
    has_softcap: bool
    has_sinks: bool

    @property
    def is_plain(self) -> bool:
        return not (self.has_softcap or self.has_sinks)


@dataclass(slots=True)
class _Recorder:
    shapes: dict[int, LayerShape] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
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
    """# layer |-> its shape. Raises ModelError when the family hides layers or their windows."""
    recorder = _Recorder()
    zero = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model.forward(zero, zero, zero[0], recorder)
    _check(model, recorder.shapes)
    return recorder.shapes


def _check(model: Model, shapes: dict[int, LayerShape]) -> None:
    config = model.config
    if sorted(shapes) != list(range(config.num_hidden_layers)):
        raise ModelError(
            f"the {config.model_type} family can't be served: attention reached the interface in "
            f"layers {sorted(shapes)} of {config.num_hidden_layers}"
        )
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if (kind == "sliding_attention") != (shapes[layer].window is not None):
            raise ModelError(
                f"the {config.model_type} family can't be served: layer {layer} is {kind} but "
                f"its attention was called with a window of {shapes[layer].window}"
            )


def derive_layout(shapes: dict[int, LayerShape], *, dtype: str, block_size: int) -> KvLayout:
    """Layers of equal span and planes share a group; groups in order of their first layer."""
    members: dict[tuple[tuple[Plane, ...], int | None], list[int]] = {}
    for layer, shape in sorted(shapes.items()):
        members.setdefault((shape.planes, shape.window), []).append(layer)
    groups = tuple(
        LayerGroup(layers=tuple(layers), planes=planes, window=window)
        for (planes, window), layers in members.items()
    )
    return KvLayout(groups=groups, dtype=dtype, block_size=block_size)
