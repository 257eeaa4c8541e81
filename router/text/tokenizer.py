"""The model's tokenizer, without torch or transformers: text <-> token ids, and chat -> text.

Runs in the router. Yields the same ids as transformers' AutoTokenizer for the same folder. For log
probabilities it also knows the exact bytes of a single token, which may be half a character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer

from kvrelay.errors import InvalidRequest, ModelError
from router.text.chat_template import ChatTemplate

LONG_CHARACTERS = 4_000
"""Longer texts take milliseconds: they are tokenized on a thread."""
LONG_TOKENS = 1_000

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """# character |-> byte, of byte-level BPE (GPT-2): printable bytes stand for themselves"""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = tokenizer.decoder
    return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()


class TokenBytes:
    """Knows byte-level BPE, byte-fallback pieces and metaspace; other tokens are plain text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items()}
        self._alphabet = _byte_alphabet() if _is_byte_level(tokenizer) else None
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._bytes_of(token_id)
        return known

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._tokenizer.id_to_token(token_id) or ""
        if self._alphabet is not None:
            return bytes(self._alphabet[c] for c in piece if c in self._alphabet)
        byte = BYTE_PIECE.fullmatch(piece)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return piece.replace("▁", " ").encode()


NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
EXTRA_SPECIAL_TOKENS = ("additional_special_tokens", "extra_special_tokens")


def read_json(path: Path) -> dict[str, Any]:
    """Empty when the file is absent. Raises ModelError when it isn't a JSON object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


class TextTokenizer:
    def __init__(
        self,
        tokenizer: Tokenizer,
        special: Mapping[str, str],
        template: str | None,
        tool_template: str | None = None,
    ) -> None:
        """`tool_template` is for chats with tools, if they have a template of their own."""
        self.backend = tokenizer
        self.special_tokens = dict(special)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._token_bytes = TokenBytes(tokenizer)
        self._template = ChatTemplate(template, special) if template is not None else None
        self._tool_template = (
            ChatTemplate(tool_template, special) if tool_template is not None else self._template
        )

    @classmethod
    def load(cls, folder: Path) -> TextTokenizer:
        """Raises ModelError when the folder has no usable tokenizer.json."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{folder} has no tokenizer.json: save the model's fast tokenizer there"
            )
        try:
            backend = Tokenizer.from_file(str(path))
        except Exception as error:
            raise ModelError(f"{path} can't be loaded: {error}") from error
        config = {
            **read_json(folder / "special_tokens_map.json"),
            **read_json(folder / "tokenizer_config.json"),
        }
        special = _special_tokens(config)
        _configure(backend, config, special)
        templates = _chat_templates(folder, config)
        return cls(backend, special, templates.get("default"), templates.get("tool_use"))

    @property
    def tool_template(self) -> str:
        """The source of the template that chats with tools have; empty: there is none."""
        return self._tool_template.source if self._tool_template is not None else ""

    def special_token_id(self, text: str) -> int | None:
        """None for what isn't a special token."""
        token_id = self.backend.token_to_id(text)
        return token_id if token_id in self.special_ids else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Raises InvalidRequest when the text has half of a surrogate pair."""
        try:
            encoding = self._encoded(text, add_special_tokens)
        except TypeError as error:
            raise InvalidRequest("the text is not valid Unicode: half a surrogate pair") from error
        return tuple(encoding.ids)

    def _encoded(self, text: str, add_special_tokens: bool) -> Encoding:
        """Only a batch lets other threads run meanwhile."""
        if len(text) <= LONG_CHARACTERS:
            return self.backend.encode(text, add_special_tokens=add_special_tokens)
        found = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return found[0]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Only a batch lets other threads run meanwhile."""
        if len(token_ids) <= LONG_TOKENS:
            return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        found = self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return str(found[0])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the text, which may be half a character."""
        return self._token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode(errors="replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Raises InvalidRequest without a template, or when the template refuses the messages."""
        template = self._tool_template if tools else self._template
        if template is None:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions (or text input), "
                "or add chat_template.jinja to the checkpoint",
                code="no_chat_template",
                param="messages",
            )
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
            tools=tools,
        )


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {name: _token_text(config.get(name)) for name in NAMED_SPECIAL_TOKENS}
    return {name: text for name, text in named.items() if text is not None}


def _configure(backend: Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Adds the settings of tokenizer_config.json to those of tokenizer.json.

    Not add_bos_token and add_eos_token: tokenizer.json's post-processor decides these.
    """
    backend.no_truncation()
    backend.no_padding()
    _add_missing_tokens(backend, config, special)


def _add_missing_tokens(
    backend: Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder") or {}
    by_id = [value for _, value in sorted(declared.items(), key=lambda item: int(item[0]))]
    extra = [value for name in EXTRA_SPECIAL_TOKENS for value in _values(config.get(name))]
    for value in [*by_id, *special.values(), *extra]:
        text = _token_text(value)
        if text and text not in known:
            backend.add_tokens([_added_token(value, text, special)])
            known.add(text)


def _values(tokens: object) -> list[object]:
    match tokens:
        case dict():
            return list(tokens.values())
        case list():
            return tokens
        case _:
            return []


def _added_token(value: object, text: str, special: Mapping[str, str]) -> AddedToken:
    options = dict(value) if isinstance(value, dict) else {"special": True}
    allowed = ("single_word", "lstrip", "rstrip", "normalized", "special")
    kept = {name: bool(options[name]) for name in allowed if name in options}
    if text in special.values():
        kept["special"] = True
    return AddedToken(text, **kept)


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """# name |-> source; the one named tool_use is for chats with tools. Files win."""
    match config.get("chat_template"):
        case str() as source:
            templates = {"default": source}
        case list() as named:
            templates = {one.get("name", ""): one["template"] for one in named}
        case _:
            templates = {}
    path = folder / "chat_template.jinja"
    if path.is_file():
        templates = {"default": path.read_text(encoding="utf-8")}
    for more in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[more.stem] = more.read_text(encoding="utf-8")
    return templates
