"""A tiny random model of any causal family that the installed transformers knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models import EOS_ID, VOCAB_SIZE, unsettle

WINDOW = 40
"""Every window of a tiny model: the prompts are far longer."""

_MOST_WEIGHTS = 10_000_000

_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "crop_size": 28,
}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": EOS_ID,
    "pad_token_id": EOS_ID,
    "sliding_window": WINDOW,
    "keep_window_size": WINDOW,
    "is_decoder": True,
}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LATENT = {"head_dim": 8, "num_key_value_heads": 4}
_SHARED = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
_SHARED_BY_ALL = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_OWN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "ctrl": {"dff": 96},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": 64,
            "ffn_hidden_size": 96,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "axk1": _LATENT,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "dots1": {"n_shared_experts": 1},
    "gemma2": {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "gemma3n_text": {**_SHARED, "num_kv_shared_layers": 2, "laurel_rank": 8},
    "gemma4_text": {**_SHARED, "num_kv_shared_layers": 2, "global_head_dim": 32},
    "gemma4_unified_text": {**_SHARED, "global_head_dim": 32},
    "gemma4_assistant": {**_SHARED_BY_ALL, "num_kv_shared_layers": 4},
    "gemma4_unified_assistant": {**_SHARED_BY_ALL, "num_kv_shared_layers": 4},
    "glm4_moe_lite": _LATENT,
    "minicpm3": _LATENT,
    "youtu": _LATENT,
    "longcat_flash": {
        **_LATENT,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 48,
        "num_layers": 2,
    },
    "lfm2_moe": {"layer_types": ["full_attention"] * 2, "num_dense_layers": 1},
    "minimax_m3_vl_text": {"shared_intermediate_size": 48, "dense_intermediate_size": 96},
    "xmod": {"default_language": "en_XX"},
    "moshi": {"ffn_dim": 96},
    "phi4_multimodal": {"vision_config": _TOWER, "audio_config": {**_TOWER, "num_blocks": 1}},
    "roc_bert": {
        "shape_vocab_size": 16,
        "pronunciation_vocab_size": 16,
        "shape_embed_dim": 8,
        "pronunciation_embed_dim": 8,
    },
}
"""What a family, or its language model, needs beyond `_SIZES`."""

_NEEDED: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_SHARED_BY_ALL}},
}
"""Families whose configuration has no valid defaults."""


def family_names() -> tuple[str, ...]:
    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def family_config(family: str, **overrides: Any) -> Any:
    """Tiny; a family that can't be tiny has its default sizes."""
    default = CONFIG_MAPPING[family](**_NEEDED.get(family, {}))
    try:
        return _tiny(family, default, overrides)
    except (AttributeError, TypeError, ValueError, StrictDataclassError):
        return default


def _tiny(family: str, default: Any, overrides: dict[str, Any]) -> Any:
    """Of a family that is made of several configurations the language model's is small."""
    own = _OWN.get(family, {})
    text = getattr(default, "text_config", None)
    if text is not None:
        own = {"text_config": {**_sizes(text), **_OWN.get(text.model_type, {}), **own}}
    return type(default)(**{**_sizes(default), **own, **overrides})


def _sizes(default: Any) -> dict[str, Any]:
    names = {*default.to_dict(), *type(default).attribute_map} - type(default).sub_configs.keys()
    sizes = {name: value for name, value in _SIZES.items() if name in names}
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if kinds and "layer_types" in names:
        sizes["num_hidden_layers"] = layers = max(2, len(kinds))
        sizes["layer_types"] = (kinds * layers)[:layers]
    return sizes


def write_weights(folder: Path) -> None:
    """Random ones for the configuration there; none for a model that can't be built."""
    config = AutoConfig.from_pretrained(folder)
    try:
        _check_size(config)
    except (TypeError, ValueError):
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        unsettle(model)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=EOS_ID)
    model.save_pretrained(folder)


def write_no_weights(folder: Path) -> None:
    """A valid file without any."""
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors")


def _check_size(config: Any) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = sum(tensor.numel() for tensor in model.parameters())
    assert weights < _MOST_WEIGHTS, f"{config.model_type} is no tiny model: {weights} weights"
