"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.types import PromptLogprob, TokenLogprobs
from kvrelay.values import value
from router.tokenizer import TextTokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON can't say."""


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


@value
class EchoedPrompt:
    """`entries` are of all its tokens but the first."""

    token_ids: Sequence[int]
    entries: Sequence[PromptLogprob]


class CompletionLogprobs:
    """One choice's, with `top` alternatives; remembers how much text came before, for
    `text_offset`."""

    def __init__(self, tokenizer: TextTokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0

    def shape(
        self, entries: Sequence[TokenLogprobs], echoed: EchoedPrompt | None = None
    ) -> dict[str, object]:
        """With the tokens of an echoed prompt, the first of which has no log probability."""
        known: list[TokenLogprobs | PromptLogprob] = [*entries]
        ids = [entry.token_id for entry in entries]
        if echoed is not None:
            known[:0], ids[:0] = echoed.entries, echoed.token_ids
        unknown = [None] * (len(ids) - len(known))
        return {
            "text_offset": [self._offset_of(token_id) for token_id in ids],
            "token_logprobs": [*unknown, *(_finite(entry.logprob) for entry in known)],
            "tokens": [self._name(token_id) for token_id in ids],
            "top_logprobs": [*unknown, *map(self._alternatives, known)],
        }

    def _offset_of(self, token_id: int) -> int:
        """Of the next token."""
        offset = self._offset
        self._offset += len(self._tokenizer.token_text(token_id))
        return offset

    def _name(self, token_id: int) -> str:
        """Its text; as OpenAI has it the bytes of one that is half a character, for many are."""
        token = self._tokenizer.token_bytes(token_id)
        try:
            return token.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)

    def _alternatives(self, entry: TokenLogprobs | PromptLogprob) -> dict[str, float]:
        """With the chosen token, even when it isn't among the best. Of two tokens with one text the
        likelier counts."""
        named: dict[str, float] = {}
        for token_id, logprob in (*entry.top[: self._top], (entry.token_id, entry.logprob)):
            named.setdefault(self._name(token_id), _finite(logprob))
        return named


def prompt_logprobs(
    tokenizer: TextTokenizer, entries: Sequence[PromptLogprob], top: int
) -> list[dict[str, object] | None]:
    """In vLLM's shape: for each token of the prompt by token id; none for the first."""
    return [None, *(_by_id(tokenizer, entry, top) for entry in entries)]


def _by_id(tokenizer: TextTokenizer, entry: PromptLogprob, top: int) -> dict[str, object]:
    best = [(i, logprob, rank) for rank, (i, logprob) in enumerate(entry.top[:top], 1)]
    return {
        str(i): {
            "logprob": _finite(logprob),
            "rank": rank,
            "decoded_token": tokenizer.token_text(i),
        }
        for i, logprob, rank in (*best, (entry.token_id, entry.logprob, entry.rank))
    }


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
