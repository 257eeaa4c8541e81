"""The shape of the bundled model, and the files it is stored in."""

import copy
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from engine.bundled.tokenizer import BOS, END_OF_TURN, EOS, save_tokenizer, token_id

CONTEXT_TOKENS = 2048
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}


def new_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A Llama with grouped queries (four heads, two of keys and values), randomly initialised."""
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_TOKENS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=token_id(tokenizer, BOS),
        eos_token_id=[token_id(tokenizer, EOS), token_id(tokenizer, END_OF_TURN)],
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def in_bfloat16(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A copy with the weights as they are stored."""
    return copy.deepcopy(model).to(torch.bfloat16)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint folder, all but its model card."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = in_bfloat16(model)
    stored.generation_config = GenerationConfig(
        bos_token_id=stored.config.bos_token_id,
        eos_token_id=stored.config.eos_token_id,
        **SAMPLING,
    )
    stored.save_pretrained(folder)
    save_tokenizer(tokenizer, folder, max_length=CONTEXT_TOKENS)
