"""Names for a sequence's blocks as it grows. Pure.

The KV of a token depends on the tokens before it, on the model and the format, and with LongRoPE on
whether the prompt reached the model's border. A name covers all of that, and the tenant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain as chained

from kvpool.core.layout.codec import Codec
from kvpool.core.layout.hashes import (
    HASH_BYTES,
    BlockHash,
    BlockHashes,
    CacheSalt,
    NamedTokens,
    SupportsTokens,
    TenantRoots,
    cache_salt,
    extend_chain,
    shared_hashes,
    token_bytes,
)
from kvpool.core.layout.layout import KvLayout
from kvrelay.types import RequestSpec

_WALK_BLOCKS = 16
"""The bytes of this many blocks are made together."""

_MIXED = "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNames:
    """The common part of one worker's names. Prompts longer than `rope_border_tokens` are computed
    in another way (LongRoPE)."""

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
    """`physical_format` of a worker's names. KV that may have come through a lossy codec, or from
    another dtype, has other names than KV that was computed or copied exactly."""
    parts = [layout.physical_format()]
    if codec != Codec.NONE:
        parts.append(f"codec-{codec}")
    if mixed_precision:
        parts.append(_MIXED)
    return "/".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFormat:
    """The parsed form of `named_format`."""

    dtype: str
    mixed_precision: bool

    @classmethod
    def of(cls, named: str) -> NamedFormat:
        dtype, *rest = named.split("/")
        return cls(dtype=dtype, mixed_precision=_MIXED in rest)


@dataclass(slots=True, kw_only=True)
class HashChain:
    """`limit`: blocks that end behind this token have no name. `roots` records the first block with
    its `label`."""

    salt: CacheSalt
    block_size: int
    limit: int | None = None
    roots: TenantRoots | None = None
    label: str = ""
    _packed: bytearray = field(default_factory=bytearray)

    def full(self, tokens: int) -> BlockHashes:
        """The names of the blocks that the first `tokens` tokens fill, as far as they exist."""
        return BlockHashes(bytes(self._packed[: tokens // self.block_size * HASH_BYTES]))

    def extend(self, token_ids: SupportsTokens, tokens: int) -> None:
        """The sequence has `tokens` tokens now."""
        end = tokens if self.limit is None else min(tokens, self.limit)
        extend_chain(self._packed, token_ids, end, block_size=self.block_size, salt=self.salt)
        if self.roots is not None and self._packed:
            self.roots.note(BlockHash(bytes(self._packed[:HASH_BYTES])), self.label)

    def begin(self, spec: RequestSpec) -> HashChain:
        """The request begins with all blocks that it has."""
        self.extend(spec.prompt_ids, len(spec.prompt_ids))
        if spec.emitted_ids:
            self.extend(spec.context_ids, spec.context_tokens)
        return self

    def told_to(self, roots: TenantRoots, label: str) -> HashChain:
        return replace(self, roots=roots, label=label)

    def walk(self, token_ids: SupportsTokens, tokens: int) -> Iterator[BlockHash]:
        """The names of the blocks that the first `tokens` tokens fill, made a few at a time."""
        return chained.from_iterable(self._pieces(token_ids, tokens))

    def _pieces(self, token_ids: SupportsTokens, tokens: int) -> Iterator[Sequence[BlockHash]]:
        parent: BlockHash | None = None
        size = self.block_size
        limit = tokens if self.limit is None else min(tokens, self.limit)
        if isinstance(token_ids, NamedTokens):
            yield token_ids.names(range(limit // size), size, self.salt)
            return
        for first in range(0, limit // size, _WALK_BLOCKS):
            until = min(first + _WALK_BLOCKS, limit // size)
            data = token_bytes(token_ids[first * size : until * size])
            hashes = shared_hashes(parent, data, size, self.salt)
            yield hashes
            parent = hashes[-1]

    def copy(self) -> HashChain:
        return replace(self, _packed=bytearray(self._packed))
