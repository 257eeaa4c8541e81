"""Small tokenizers of the two common kinds, trained on the spot, as checkpoint folders."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = (
    "In the beginning God created the heaven and the earth.  Two  spaces,\n\tand a tab.",
    "Der Fuchs läuft über die Straße; « ça va très bien », señor Ñandú.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "いろはにほへと ちりぬるを 漢字も少し書きます。敏捷的棕色狐狸跳过了懒狗。",
    "نص حكيم له سر قاطع وذو شأن عظيم",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश",
    "Emoji: 😀😃 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 ✨ end",
    "def f(x):\n    return x ** 2  # ²³ ≠ ∞ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
)

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {%- if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "    {%- if message.role == 'skip' %}{% continue %}{% endif %}\n"
    "<|{{ message.role }}|>{{ message['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if tools %}{{ tools | tojson }}{% endif %}\n"
    "{{ {'a': '<b>é'} | tojson }}{% generation %}!{% endgeneration %}\n"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

SPECIAL = ["<|end|>", "<|begin|>", "<|user|>", "<|assistant|>", "<|system|>"]


def byte_level(folder: Path, **config: object) -> Path:
    """GPT-2's kind: a token may be part of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS[:3], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 1)]
    )
    return _save(_with_crossing_token(tokenizer), folder, config)


CROSSING = "\u0122ðŁĺ"
"""The last byte of one emoji and the first three of the next, in byte-level BPE's alphabet."""


def _with_crossing_token(tokenizer: Tokenizer) -> Tokenizer:
    state = json.loads(tokenizer.to_str())
    vocab = state["model"]["vocab"]
    vocab[CROSSING] = len(vocab)
    return Tokenizer.from_str(json.dumps(state))


def byte_fallback(folder: Path, **config: object) -> Path:
    """Llama 2's kind: spaces are marks, unknown characters fall back to byte pieces."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[*SPECIAL, "<unk>"], show_progress=False
    )
    tokenizer.normalizer = _marks()
    tokenizer.train_from_iterator(TEXTS[:2], trainer)
    state = json.loads(tokenizer.to_str())
    vocab = state["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    state["model"]["byte_fallback"] = True
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _save(tokenizer, folder, config)


def _marks() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def _save(tokenizer: Tokenizer, folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
