"""Reads numbers out of a Hugging Face configuration, whatever a family calls them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvrelay.errors import ModelError

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads")
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


@dataclass(frozen=True, slots=True)
class ShapeKeys:
    """The text model's part of a configuration; `name` is for messages."""

    name: str
    values: Mapping[str, object]

    def get(self, *keys: str) -> int | None:
        """The first of `keys` that holds a whole number."""
        held = (self.values.get(key) for key in keys)
        return next((v for v in held if isinstance(v, int) and not isinstance(v, bool)), None)

    def need(self, *keys: str) -> int:
        """As `get`. Raises ModelError when there is none, or none above zero."""
        found = self.get(*keys)
        if found is None or found <= 0:
            raise ModelError(
                f"{self.name}: its configuration needs {' or '.join(keys)} above zero, "
                f"found {found}: give a language model's config.json"
            )
        return found

    def layer_types(self) -> list[str] | None:
        """One name per layer, where the configuration says them."""
        named = self.values.get("layer_types")
        return [str(name) for name in named] if isinstance(named, list | tuple) else None
