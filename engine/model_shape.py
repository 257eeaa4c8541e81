"""What a model costs, read from its Hugging Face configuration: parameters, KV, operations. Pure.

Counts what takes time and memory: projections, experts, embeddings. Norms, biases, the experts'
routers and vision towers are left out (under 1 % of the language model).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.attention_shape import Attention, attentions
from engine.shape_keys import EXPERTS, HIDDEN, LAYERS, ShapeKeys

_UNGATED = {"opt", "gpt2", "bloom", "gpt_neox", "gptj", "falcon", "mpt", "phi", "starcoder2"}
"""Families whose feed-forward network has two matrices, not three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """`parameters` are all stored ones. A token's pass goes through `dense_parameters` and
    through `experts_per_token` of the `experts` in each layer, which together have
    `expert_parameters`; the output head's `head_parameters` count only where one is sampled."""

    name: str
    layers: int
    hidden: int
    parameters: int
    dense_parameters: int
    head_parameters: int
    expert_parameters: int
    experts: int
    experts_per_token: int
    attentions: tuple[Attention, ...]

    @property
    def active_parameters(self) -> float:
        """Of one token's pass, without the head; the embedding is a look-up and has no part."""
        share = self.experts_per_token / self.experts if self.experts else 0.0
        return self.dense_parameters + self.expert_parameters * share

    @property
    def kv_elements_per_token(self) -> int:
        """Of a token that no window has passed yet."""
        return sum(kind.layers * kind.kv_elements for kind in self.attentions)

    def kv_bytes_per_token(self, element_bytes: float = 2) -> float:
        return self.kv_elements_per_token * element_bytes

    @property
    def state_bytes_per_sequence(self) -> int:
        return sum(kind.layers * kind.state_bytes for kind in self.attentions)

    def touched_expert_parameters(self, tokens: float) -> float:
        """Those that must be read, expected when each of `tokens` draws its experts evenly."""
        if not self.experts:
            return 0.0
        missed = (1 - self.experts_per_token / self.experts) ** tokens
        return self.expert_parameters * (1 - missed)


def read_shape(config: Mapping[str, object], name: str) -> ModelShape:
    """Raises ModelError, naming the key, for a configuration that lacks what is needed."""
    inner = config.get("text_config")
    keys = ShapeKeys(name, inner if isinstance(inner, Mapping) else config)
    layers, hidden = keys.need(*LAYERS), keys.need(*HIDDEN)
    kinds = attentions(keys, layers, hidden)
    dense_mlp, expert_mlp = _feed_forward(keys, layers, hidden)
    dense = sum(kind.layers * kind.parameters for kind in kinds) + dense_mlp
    head = keys.need("vocab_size") * hidden
    tied = config.get("tie_word_embeddings", keys.values.get("tie_word_embeddings", False))
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        parameters=dense + expert_mlp + head * (1 if tied else 2),
        dense_parameters=dense,
        head_parameters=head,
        expert_parameters=expert_mlp,
        experts=keys.get(*EXPERTS) or 0,
        experts_per_token=keys.get("num_experts_per_tok") or 0,
        attentions=kinds,
    )


def _feed_forward(keys: ShapeKeys, layers: int, hidden: int) -> tuple[int, int]:
    """Parameters of the dense and shared networks, and of all routed experts."""
    experts = keys.get(*EXPERTS)
    if not experts:
        matrices = 2 if keys.values.get("model_type") in _UNGATED else 3
        return layers * matrices * hidden * _inner_width(keys, hidden), 0
    dense_layers = keys.get("first_k_dense_replace") or 0
    sparse_layers = layers - dense_layers
    inner = keys.get("moe_intermediate_size") or keys.need("intermediate_size")
    shared = keys.get("shared_expert_intermediate_size")
    if shared is None:
        shared = inner * (keys.get("n_shared_experts") or 0)
    wide = dense_layers * keys.need("intermediate_size") if dense_layers else 0
    dense = 3 * hidden * (wide + sparse_layers * shared)
    return dense, sparse_layers * experts * 3 * hidden * inner


def _inner_width(keys: ShapeKeys, hidden: int) -> int:
    """GPT-2 and BLOOM say it only where it isn't 4 x the hidden size."""
    return keys.get("intermediate_size", "ffn_dim", "n_inner") or 4 * hidden
