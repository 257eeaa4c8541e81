"""Names for a sequence's blocks as it grows. Pure.

The KV of a token depends on the tokens before it, on the model and the format, and with LongRoPE on
whether the prompt reached the model's border. A name covers all of that, and the tenant.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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

_PIECE_BLOCKS = 16
"""The names of this many blocks are made together."""

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

    def lazily(self, token_ids: SupportsTokens, tokens: int) -> LazyNames:
        """The names of the blocks that the first `tokens` tokens fill. Those that the chain has are
        there already."""
        end = tokens if self.limit is None else min(tokens, self.limit)
        return LazyNames(token_ids, [*self.full(end)], end // self.block_size, self)

    def copy(self) -> HashChain:
        return replace(self, _packed=bytearray(self._packed))


class LazyNames:
    """The names of a sequence's full blocks. A few are made at a time, when one of them is asked
    for."""

    def __init__(
        self, token_ids: SupportsTokens, known: list[BlockHash], blocks: int, chain: HashChain
    ) -> None:
        self._token_ids, self._hashes, self._blocks = token_ids, known, blocks
        self._size, self._salt = chain.block_size, chain.salt

    def __len__(self) -> int:
        return self._blocks

    def at(self, index: int) -> BlockHash:
        while len(self._hashes) <= index:
            self._extend()
        return self._hashes[index]

    def _extend(self) -> None:
        first, size = len(self._hashes), self._size
        if isinstance(self._token_ids, NamedTokens):
            self._hashes += self._token_ids.names(range(first, self._blocks), size, self._salt)
            return
        until = min(first + _PIECE_BLOCKS, self._blocks)
        data = token_bytes(self._token_ids[first * size : until * size])
        parent = self._hashes[-1] if first else None
        self._hashes += shared_hashes(parent, data, size, self._salt)
