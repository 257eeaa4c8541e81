"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.types import TokenLogprobs
from router.tokenizer import TextTokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON can't say."""


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


class CompletionLogprobs:
    """One choice's; remembers how much text came before, for `text_offset`."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def shape(self, entries: Sequence[TokenLogprobs]) -> dict[str, object]:
        tokens = [self._tokenizer.token_text(entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "tokens": tokens,
            "top_logprobs": [self._top(entry) for entry in entries],
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """With the chosen token, even when it isn't among the best."""
        pairs = [*entry.top, (entry.token_id, entry.logprob)]
        return {self._tokenizer.token_text(i): _finite(logprob) for i, logprob in pairs}


def chat_logprobs(tokenizer: TextTokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, object]:
    content = [
        {
            **_chat_token(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_token(tokenizer, i, logprob) for i, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: TextTokenizer, token_id: int, logprob: float) -> dict[str, object]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
