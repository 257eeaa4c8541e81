"""System prompts whose KV every prefill worker computes once and keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import TYPE_CHECKING

from kvrelay.types import RequestKey, RequestSpec, Sampling

if TYPE_CHECKING:
    from router.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloadText:
    """`is_system`: rendered by the chat template as a system message, else a plain prompt's
    beginning. `tenant`: the part of the cache where it is found."""

    text: str
    is_system: bool
    tenant: str = ""


def preload_specs(
    texts: Sequence[PreloadText], tokenizer: TextTokenizer
) -> tuple[RequestSpec, ...]:
    """The requests for prefill workers. Raises InvalidRequest when there is no chat template."""
    return tuple(_spec(_token_ids(text, tokenizer), text.tenant) for text in texts)


def _token_ids(text: PreloadText, tokenizer: TextTokenizer) -> tuple[int, ...]:
    """The tokens that all requests with this beginning share."""
    if not text.is_system:
        return tokenizer.encode(text.text, add_special_tokens=True)
    chats = [
        tokenizer.encode(_chat(text.text, user, tokenizer), add_special_tokens=False)
        for user in ("a", "1")
    ]
    same = takewhile(lambda pair: pair[0] == pair[1], zip(*chats, strict=False))
    return tuple(ours for ours, _ in same)


def _chat(system: str, user: str, tokenizer: TextTokenizer) -> str:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return tokenizer.render_chat(messages, add_generation_prompt=True)


def _spec(prompt_ids: tuple[int, ...], tenant: str) -> RequestSpec:
    digest = blake2b(repr((prompt_ids, tenant)).encode(), digest_size=8).hexdigest()
    return RequestSpec(
        key=RequestKey(f"preload-{digest}", 0),
        prompt_ids=prompt_ids,
        sampling=Sampling(max_tokens=1, seed=0),
        tenant=tenant,
    )
