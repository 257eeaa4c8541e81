"""What each kind of attention layer keeps and computes, read from a configuration. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from engine.shape_keys import HEADS, ShapeKeys

_FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Layers that are alike. `parameters`, `kv_elements` (of a token), the operations of a
    query-key pair and `state_bytes` (of a sequence, whatever its length) are of one layer.

    `kv_heads` bounds how far tensor parallelism can split its KV: beyond it, it is kept twice.
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

    def kept_tokens(self, tokens: float) -> float:
        """Of a sequence of `tokens`."""
        return min(tokens, self.window) if self.window else tokens

    def seen_tokens(self, context: float) -> float:
        """How many earlier tokens a query after `context` others attends to."""
        return min(context, self.window or context, self.reads_at_most or context)


def attentions(keys: ShapeKeys, layers: int, hidden: int) -> tuple[Attention, ...]:
    """Raises ModelError where the configuration lacks what its attention needs."""
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
    main = Attention(
        layers=layers,
        parameters=down + up + heads * value * hidden,
        kv_elements=latent + rope,
        prefill_flops_per_pair=2.0 * heads * (nope + rope + value),
        decode_flops_per_pair=2.0 * heads * (2 * latent + rope),
        reads_at_most=keys.get("index_topk"),
    )
    return (main, _indexer(keys, layers, hidden)) if keys.get("index_topk") else (main,)


def _indexer(keys: ShapeKeys, layers: int, hidden: int) -> Attention:
    """Of DeepSeek's sparse attention (DeepSeek-V3.2): scores all tokens, the main one reads few."""
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
