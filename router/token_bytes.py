"""The exact bytes of single tokens, for logprobs: a token may be half a character."""

from __future__ import annotations

import re

from tokenizers import Tokenizer

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
