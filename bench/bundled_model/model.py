"""The shape of the bundled model, its tokenizer, the files it is stored in, and its training run.

The tokenizer is a byte-level BPE, so that any UTF-8 text comes back unchanged.
"""

import copy
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

BOS = "<|begin|>"
EOS = "<|endoftext|>"
END_OF_TURN = "<|end|>"
ROLES = {role: f"<|{role}|>" for role in ("system", "user", "assistant")}
SPECIAL_TOKENS = [EOS, BOS, END_OF_TURN, *ROLES.values()]

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' ~ message['role']) }}"
    "{% endif %}"
    "{{ '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """BPE merges over `texts`; a text is encoded with `BOS` in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, token_id(tokenizer, BOS))],
    )
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the vocabulary is known to hold."""
    found = tokenizer.token_to_id(token)
    assert found is not None, f"{token!r} is not in the vocabulary"
    return found


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    """Write the three files that `transformers.AutoTokenizer` reads."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "additional_special_tokens": [END_OF_TURN, *ROLES.values()],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "special_tokens_map.json", special)


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The training run. Every step reads `tokens_per_step` tokens, in short or in long windows."""

    seed: int = 1813
    vocab_size: int = 3072
    steps: int = 2100
    warmup_steps: int = 60
    tokens_per_step: int = 4096
    short_tokens: int = 256
    long_every: int = 8  # one step in so many reads windows of the full context
    matrix_lr: float = 6e-3
    other_lr: float = 6e-3
    final_lr_fraction: float = 0.02
    weight_decay: float = 0.05
    hold_out_every: int = 40  # one document in so many
    save_every: int = 150

    def window_tokens(self, step: int) -> int:
        """The length of the windows of this step."""
        return CONTEXT_TOKENS if step % self.long_every == 0 else self.short_tokens

    def lr_fraction(self, step: int) -> float:
        """Linear warm-up, then a cosine down to `final_lr_fraction`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / (self.steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        return self.final_lr_fraction + (1 - self.final_lr_fraction) * cosine
