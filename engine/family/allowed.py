"""Decides which families can be served, from the configuration, before weights are loaded."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from engine.model.families import refusal, ropes
from engine.support.matrix import NAMED

_SPANS = {"full_attention", "sliding_attention"}


def check_family(config: PretrainedConfig) -> None:
    """Raises ModelError, with the reason, for a family that would give wrong tokens."""
    kind = config.model_type
    if kind in NAMED:
        raise refusal(kind, "family", NAMED[kind])
    _check_class(config)
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - _SPANS)
    if odd:
        raise refusal(kind, "layer types", f"it has {', '.join(odd)} layers")
    if any(rope.get("rope_type") == "dynamic" for rope in ropes(config)):
        raise refusal(
            kind,
            "RoPE",
            "with dynamic RoPE a token's KV depends on the longest sequence of its batch",
        )


def _check_class(config: PretrainedConfig) -> None:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refusal(
            config.model_type, "architecture", "it has no causal language model in transformers"
        )
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not model_class._supports_attention_backend:
        raise refusal(
            config.model_type,
            "interface",
            "its attention bypasses transformers' attention interface",
        )
