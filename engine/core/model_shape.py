"""A model's parameters, KV and operations, from its Hugging Face configuration. Pure.

Counts what takes time and memory: projections, experts, embeddings, and each kind of attention
layer. Norms, biases, the experts' routers and vision towers are left out (under 1 % of the language
model). Families use different names for the same number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

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
        """The first of `keys` with a whole number."""
        held = (self.values.get(key) for key in keys)
        return next((v for v in held if isinstance(v, int) and not isinstance(v, bool)), None)

    def need(self, *keys: str) -> int:
        """Like `get`. Raises ModelError without a number above zero."""
        found = self.get(*keys)
        if found is None or found <= 0:
            raise ModelError(
                f"{self.name}: its configuration needs {' or '.join(keys)} above zero, "
                f"found {found}: give a language model's config.json"
            )
        return found

    def layer_types(self) -> list[str] | None:
        """One name per layer, if the configuration has them."""
        named = self.values.get("layer_types")
        return [str(name) for name in named] if isinstance(named, list | tuple) else None


_FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Layers of one kind. `parameters`, `kv_elements` (of a token), the operations of a query-key
    pair and `state_bytes` (of a sequence, whatever its length) are those of one layer.

    `kv_heads` limits how far tensor parallelism can split the KV: beyond it, heads are kept twice.
    `expanded`: the same layers where the keys and values of all heads are kept, if that is not so.
    """

    layers: int
    parameters: int
    kv_elements: int = 0
    kv_heads: int = 1
    prefill_flops_per_pair: float = 0.0
    decode_flops_per_pair: float = 0.0
    window: int | None = None
    reads_at_most: int | None = None
    state_bytes: int = 0
    expanded: Attention | None = None

    def kept_tokens(self, tokens: float) -> float:
        """Tokens kept of a sequence of `tokens`."""
        return min(tokens, self.window) if self.window else tokens

    def seen_tokens(self, context: float) -> float:
        """The number of earlier tokens that a query after `context` others attends to."""
        return min(context, self.window or context, self.reads_at_most or context)


def attentions(keys: ShapeKeys, layers: int, hidden: int) -> tuple[Attention, ...]:
    """Raises ModelError if the configuration lacks a value that its attention needs."""
    if keys.get("kv_lora_rank"):
        return _latent(keys, layers, hidden)
    counts = Counter(keys.layer_types() or ["full_attention"] * layers)
    linear = counts.pop("linear_attention", 0)
    window = keys.get("sliding_window") if keys.values.get("use_sliding_window", True) else None
    sliding = layers if keys.layer_types() is None and window else counts["sliding_attention"]
    kinds = [
        _grouped(keys, layers - linear - sliding, hidden, None),
        _grouped(keys, sliding, hidden, window),
    ]
    if linear:
        kinds.append(_linear(keys, linear, hidden))
    return tuple(kind for kind in kinds if kind.layers)


def _grouped(keys: ShapeKeys, layers: int, hidden: int, window: int | None) -> Attention:
    """Multi-head or grouped-query attention."""
    heads = keys.need(*HEADS)
    kv_heads = keys.get("num_key_value_heads") or heads
    dim = keys.get("head_dim") or hidden // heads
    gate = heads if keys.values.get("attn_output_gate") else 0
    flops = 4.0 * heads * dim
    return Attention(
        layers=layers,
        parameters=hidden * dim * (2 * heads + 2 * kv_heads + gate),
        kv_elements=2 * kv_heads * dim,
        kv_heads=kv_heads,
        prefill_flops_per_pair=flops,
        decode_flops_per_pair=flops,
        window=window,
    )


def _latent(keys: ShapeKeys, layers: int, hidden: int) -> tuple[Attention, ...]:
    """MLA (DeepSeek-V2, arXiv:2405.04434 §2.1): a latent and a shared rotary key are kept.

    Prefill expands the latent to heads; decode works on the latent itself ("absorbed").
    """
    heads, latent = keys.need(*HEADS), keys.need("kv_lora_rank")
    rope, nope = keys.need("qk_rope_head_dim"), keys.need("qk_nope_head_dim")
    value, query_rank = keys.need("v_head_dim"), keys.get("q_lora_rank")
    query = heads * (nope + rope)
    down = hidden * (query_rank or 0) + hidden * (latent + rope)
    up = (query_rank or hidden) * query + latent * heads * (nope + value)
    flops = 2.0 * heads * (nope + rope + value)
    expanded = Attention(
        layers=layers,
        parameters=down + up + heads * value * hidden,
        kv_elements=heads * (nope + rope + value),
        kv_heads=heads,
        prefill_flops_per_pair=flops,
        decode_flops_per_pair=flops,
        reads_at_most=keys.get("index_topk"),
    )
    main = replace(
        expanded,
        kv_elements=latent + rope,
        kv_heads=1,
        decode_flops_per_pair=2.0 * heads * (2 * latent + rope),
        expanded=expanded,
    )
    return (main, _indexer(keys, layers, hidden)) if keys.get("index_topk") else (main,)


def _indexer(keys: ShapeKeys, layers: int, hidden: int) -> Attention:
    """The indexer of DeepSeek's sparse attention (DeepSeek-V3.2): it scores all tokens, the main
    attention reads few."""
    heads, dim = keys.need("index_n_heads"), keys.need("index_head_dim")
    return Attention(
        layers=layers,
        parameters=keys.need("q_lora_rank") * heads * dim + hidden * dim,
        kv_elements=dim,
        prefill_flops_per_pair=2.0 * heads * dim,
        decode_flops_per_pair=2.0 * heads * dim,
    )


def _linear(keys: ShapeKeys, layers: int, hidden: int) -> Attention:
    """Gated delta networks (Qwen3-Next): a state per sequence instead of KV per token."""
    key_dim, value_dim = keys.need("linear_key_head_dim"), keys.need("linear_value_head_dim")
    values = keys.need("linear_num_value_heads")
    keys_width = keys.need("linear_num_key_heads") * key_dim
    return Attention(
        layers=layers,
        parameters=hidden * (2 * keys_width + 3 * values * value_dim),
        state_bytes=values * key_dim * value_dim * _FP32_BYTES,
    )


_UNGATED = {"opt", "gpt2", "bloom", "gpt_neox", "gptj", "falcon", "mpt", "phi", "starcoder2"}
"""Families whose feed-forward network has two matrices, not three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """`parameters` are all stored ones. A token's pass uses `dense_parameters`, and
    `experts_per_token` of the `experts` in each layer, which together have `expert_parameters`. The
    output head's `head_parameters` count only for sampled tokens."""

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
        """Parameters of one token's pass, without the head; the embedding is a look-up and doesn't
        count."""
        share = self.experts_per_token / self.experts if self.experts else 0.0
        return self.dense_parameters + self.expert_parameters * share

    @property
    def is_tied(self) -> bool:
        """The output head has no weights of its own."""
        counted = self.dense_parameters + self.expert_parameters + 2 * self.head_parameters
        return self.parameters < counted

    @property
    def as_served(self) -> ModelShape:
        """As kvrelay's engine runs it: transformers' attention gets the keys and values of all
        heads, and these are kept."""
        return replace(self, attentions=tuple(one.expanded or one for one in self.attentions))

    @property
    def kv_elements_per_token(self) -> int:
        """For a token that no window has passed yet."""
        return sum(kind.layers * kind.kv_elements for kind in self.attentions)

    def kv_bytes_per_token(self, element_bytes: float = 2) -> float:
        return self.kv_elements_per_token * element_bytes

    @property
    def state_bytes_per_sequence(self) -> int:
        return sum(kind.layers * kind.state_bytes for kind in self.attentions)

    def touched_expert_parameters(self, tokens: float) -> float:
        """The expected number that must be read when each of `tokens` draws its experts evenly."""
        if not self.experts:
            return 0.0
        missed = (1 - self.experts_per_token / self.experts) ** tokens
        return self.expert_parameters * (1 - missed)


def read_shape(config: Mapping[str, object], name: str) -> ModelShape:
    """Raises ModelError that names the missing key of a configuration."""
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
    """GPT-2 and BLOOM name it only if it isn't 4 x the hidden size."""
    return keys.get("intermediate_size", "ffn_dim", "n_inner") or 4 * hidden
