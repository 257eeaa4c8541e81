"""What transformers' layers call as their attention: they look it up by its name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import AttentionInterface

from engine.model.families import refusal
from engine.model.interface import NAME, OPERATOR
from kvrelay.errors import ModelError

_IGNORED = {
    "cache_position",
    "dropout",
    "is_causal",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}
"""Keywords without an effect on a causal model in evaluation mode."""


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Called by transformers' layers. Raises ModelError for an argument that would be ignored."""
    if attention_mask is not None:
        raise _refused(module, "mask", "it makes a mask of its own")
    _check_keywords(module, others)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = module.layer_idx
    return OPERATOR(query, key, value, layer, scaling, sliding_window, softcap, s_aux), None


def _check_keywords(module: torch.nn.Module, others: Mapping[str, object]) -> None:
    odd = [name for name in others if name not in _IGNORED and others[name] is not None]
    if odd:
        raise _refused(module, "keyword", f"it calls attention with {', '.join(sorted(odd))}")
    if others.get("is_causal") is False:
        raise _refused(module, "keyword", "its attention is not causal")


def _refused(module: torch.nn.Module, check: str, reason: str) -> ModelError:
    kind = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
    return refusal(str(kind), check, f"layer {module.layer_idx}: {reason}")


def register() -> None:
    """Registers `attn_implementation="kvrelay"` with transformers. Idempotent.

    No mask function is registered under the name, so models build no mask.
    """
    AttentionInterface.register(NAME, attention)
