"""Names for a sequence's blocks as it grows. Pure.

The KV of a token depends on the tokens before it, on the model and the format, and with LongRoPE on
whether the prompt reached the model's border. All of that, and the tenant, is in the name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvpool.codec import Codec
from kvpool.hashes import (
    BlockHash,
    CacheSalt,
    NamedTokens,
    SupportsTokens,
    block_hash,
    cache_salt,
    extend_chain,
)
from kvpool.layout import KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNames:
    """What all names of one worker share. `rope_border_tokens`: prompts that are longer are
    computed in another way (LongRoPE)."""

    fingerprint: str = ""
    physical_format: str = ""
    rope_border_tokens: int | None = None

    def chain(self, tenant: str, prompt_tokens: int, block_size: int) -> HashChain:
        border = self.rope_border_tokens
        is_long = border is not None and prompt_tokens > border
        salt = cache_salt(
            fingerprint=self.fingerprint,
            physical_format=f"{self.physical_format}/long" if is_long else self.physical_format,
            tenant=tenant,
        )
        return HashChain(salt=salt, block_size=block_size, limit=None if is_long else border)


def named_format(layout: KvLayout, *, codec: str, mixed_precision: bool) -> str:
    """`physical_format` of a worker's names. What may have come to it through a lossy codec, or
    from another dtype, has other names than what its like compute or copy exactly."""
    parts = [layout.physical_format()]
    if codec != Codec.NONE:
        parts.append(f"codec-{codec}")
    if mixed_precision:
        parts.append("mixed")
    return "/".join(parts)


@dataclass(slots=True, kw_only=True)
class HashChain:
    """`limit`: blocks that end behind this token have no name."""

    salt: CacheSalt
    block_size: int
    limit: int | None = None
    _hashes: list[BlockHash] = field(default_factory=list)

    def full(self, tokens: int) -> Sequence[BlockHash]:
        """Of the blocks that the first `tokens` tokens fill, as far as they have been named."""
        return self._hashes[: tokens // self.block_size]

    def extend(self, token_ids: SupportsTokens, tokens: int) -> None:
        """The sequence has `tokens` tokens by now."""
        end = tokens if self.limit is None else min(tokens, self.limit)
        extend_chain(self._hashes, token_ids, end, block_size=self.block_size, salt=self.salt)

    def walk(self, token_ids: SupportsTokens, tokens: int) -> Iterator[BlockHash]:
        """The names of the blocks that the first `tokens` tokens fill, each made when asked for."""
        parent, size = None, self.block_size
        limit = tokens if self.limit is None else min(tokens, self.limit)
        if isinstance(token_ids, NamedTokens):
            yield from token_ids.names(range(limit // size), size, self.salt)
            return
        for end in range(size, limit + 1, size):
            parent = block_hash(parent, token_ids[end - size : end], self.salt)
            yield parent

    def copy(self) -> HashChain:
        return replace(self, _hashes=list(self._hashes))
