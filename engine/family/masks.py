"""Compares the masks that transformers composes with the arguments of the layers' calls.

kvrelay's attention builds no mask: a layer's call must describe it fully. In the probe's one
forward pass transformers composes its masks too, and each layer's mask is evaluated on pairs of
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PretrainedConfig

from engine.family.attention import attention
from engine.model.families import refusal
from engine.model.interface import NAME as SERVING
from engine.model.kv_layout import LayerShape, ShapeRecorder, run_probe
from engine.model.model import Model

NAME = "kvrelay_probe"

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Batch, head, query position, key position: true if the query sees the key."""


@dataclass(slots=True)
class Masks:
    """# mask built in this pass |-> its function; # layer |-> the mask it was called with"""

    composed: list[tuple[torch.Tensor, MaskFunction]] = field(default_factory=list)
    used: dict[int, torch.Tensor | None] = field(default_factory=dict)

    def of_layer(self, layer: int) -> MaskFunction | None:
        """None: the layer got no mask, or one that transformers did not compose."""
        found = self.used.get(layer)
        return next((visible for mask, visible in self.composed if mask is found), None)


_MASKS: ContextVar[Masks] = ContextVar("kvrelay_masks")


def check_masks(model: Model, shapes: dict[int, LayerShape], longest: int) -> None:
    """The mask that transformers composes for a layer, and the tokens that its cache keeps, must
    match the layer's call, in sequences of up to `longest` tokens. Raises ModelError."""
    kind = model.config.model_type
    with composed_masks(model.module, SERVING) as masks:
        run_probe(model, ShapeRecorder(kind))
    for layer, shape in shapes.items():
        _check_mask(kind, layer, masks.of_layer(layer), shape.window, longest)
    for layer, kept in enumerate(cached_windows(model.module.config)):
        if layer in shapes:
            _check_cache(kind, layer, kept, shapes[layer].window, longest)


def _check_mask(
    kind: str, layer: int, visible: MaskFunction | None, window: int | None, longest: int
) -> None:
    if visible is None:
        raise refusal(kind, "mask", f"layer {layer} uses a mask that transformers did not compose")
    if difference := mask_difference(visible, window, longest):
        raise refusal(kind, "mask", f"layer {layer}: {difference}")


def _check_cache(kind: str, layer: int, kept: int | None, window: int | None, longest: int) -> None:
    if kept is not None and kept < longest and (window is None or window > kept):
        raise refusal(
            kind,
            "cache",
            f"layer {layer}: transformers caches {kept} tokens, but its attention was called with "
            f"a window of {window}",
        )


@contextmanager
def composed_masks(module: torch.nn.Module, usual: str) -> Iterator[Masks]:
    """In this context `module` builds its masks. `usual`: the implementation that it has
    otherwise."""
    _register()
    masks = Masks()
    token = _MASKS.set(masks)
    module.set_attn_implementation(NAME)  # type: ignore[operator]
    try:
        yield masks
    finally:
        module.set_attn_implementation(usual)  # type: ignore[operator]
        _MASKS.reset(token)


def cached_windows(config: PretrainedConfig) -> list[int | None]:
    """For each layer with a cache: the last tokens that transformers keeps; None: all."""
    layers = DynamicCache(config=config).layers
    return [getattr(layer, "sliding_window", None) for layer in layers]


def mask_difference(visible: MaskFunction, window: int | None, longest: int) -> str | None:
    """A place where `visible` is not causal attention with this window, in sequences of up to
    `longest` tokens; None: all checked pairs agree."""
    queries, keys = _pairs(window, longest)
    zero = torch.zeros_like(queries)
    try:
        found = visible(zero, zero, queries, keys).expand(queries.shape).bool()
    except (IndexError, RuntimeError):
        return "its mask depends on more than positions"
    said = keys <= queries
    if window is not None:
        said &= keys > queries - window
    wrong = (found != said).nonzero()
    if not len(wrong):
        return None
    query, key = int(queries[wrong[0]]), int(keys[wrong[0]])
    sees = "does not see" if said[wrong[0]] else "sees"
    return f"in its mask token {query} {sees} token {key}, in its call (window {window}) otherwise"


def _pairs(window: int | None, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries at the powers of two, around the window and at the end; for each the keys nearby, at
    the window's border and at the powers of two before it."""
    last = longest - 1
    steps = [0, *(2**i for i in range(longest.bit_length()))]
    around = [] if window is None else [window - 1, window, window + 1, 2 * window + 1]
    queries = sorted({min(q, last) for q in (*steps, *(s + 1 for s in steps), *around, last)})
    pairs = set()
    for query in queries:
        back = [-1, *steps, *(step - 1 for step in steps), *around, query]
        pairs |= {(query, query - b) for b in back if 0 <= query - b <= last}
    found = torch.tensor(sorted(pairs))
    return found[:, 0], found[:, 1]


def _register() -> None:
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, **_: object
) -> torch.Tensor:
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool)
    _MASKS.get().composed.append((mask, mask_function))
    return mask


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *scores: object,
    **others: object,
) -> tuple[torch.Tensor, None]:
    layer: Any = module.layer_idx
    _MASKS.get().used[layer] = attention_mask
    return attention(module, query, key, value, None, *scores, **others)  # type: ignore[arg-type]
