"""A tokenizer for llguidance in tests: ids below 256 are bytes, 256 is the end of sequence."""

from __future__ import annotations

from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

EOS = 256


class _Bytes:
    bos_token_id = None
    special_token_ids = (EOS,)

    def __init__(self, vocab: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        nothing = [b""] * (vocab - 257)
        self.tokens = [*[bytes([i]) for i in range(256)], b"<eos>", *nothing]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def byte_tokenizer(vocab: int, eos_id: int = EOS) -> LLTokenizer:
    """`vocab` may be larger than 257: the ids behind have no bytes."""
    return LLTokenizer(TokenizerWrapper(_Bytes(vocab, eos_id)), eos_token=[eos_id])
