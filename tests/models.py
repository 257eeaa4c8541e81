"""Small random checkpoints of many families, complete with tokenizer, for the tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

VOCAB_SIZE = 512
EOS_ID = 0

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] ~ ': ' ~ message['content'] ~ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": EOS_ID,
    "pad_token_id": EOS_ID,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 48, "head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "num_hidden_layers": 4},
    "gemma2": {
        "sliding_window": 40,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "sliding_window": 40,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"sliding_window": None},
    "phi3_longrope": {
        "sliding_window": None,
        "max_position_embeddings": 1024,
        "original_max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [2.0 + 0.5 * i for i in range(8)],
            "original_max_position_embeddings": 256,
        },
    },
    "olmo2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 40,
    },
}


def family_config(family: str, **overrides: Any) -> Any:
    """The small configuration of a family (a key of FAMILIES)."""
    settings = {**_COMMON, **FAMILIES[family], **overrides}
    return AutoConfig.for_model(family.removesuffix("_longrope"), **settings)


def random_checkpoint(
    folder: Path, family: str = "llama", *, seed: int = 0, **overrides: Any
) -> Path:
    """Write a random model of the family (a key of FAMILIES) and its tokenizer; returns `folder`.

    Equal arguments give equal weights. `overrides` are keys of the model's configuration.
    """
    config = family_config(family, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        unsettle(model)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id
    )
    model.save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size)
    return folder


def unsettle(model: torch.nn.Module) -> None:
    """Give what transformers starts at constants (sinks, biases) values that matter."""
    for name, tensor in model.named_parameters():
        if name.endswith(("sinks", "bias")):
            torch.nn.init.normal_(tensor, std=0.2)


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, 4096),
        special_tokens=["<eos>", "<bos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_words(vocab_size), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<eos>"
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _words(count: int) -> list[str]:
    letters = random.Random(0)
    return [
        " ".join("".join(letters.choices("aeinorst", k=6)) for _ in range(8)) for _ in range(count)
    ]
