"""Names for a sequence's blocks as it grows. Pure.

The KV of a token depends on the tokens before it, on the model and the format, and with LongRoPE on
whether the prompt reached the model's border. A name covers all of that, and the tenant.
"""

from __future__ import annotations

from bisect import bisect_right
from copy import copy
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeGuard

from kvpool.core.layout.codec import Codec
from kvpool.core.layout.hashes import (
    TOKEN_BYTES,
    BlockHash,
    BlockHashes,
    CacheSalt,
    NamedTokens,
    SupportsTokens,
    TenantRoots,
    cache_salt,
    keyed_state,
    packed_hashes,
    token_bytes,
)
from kvpool.core.layout.layout import KvLayout
from kvrelay.types import RequestSpec

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


class HashChain:
    """The names of a growing sequence's full blocks. A name is made when it is asked for; a few
    states of the hash are kept to begin from.

    `limit`: blocks that end behind this token have no name. `roots` records the first block with
    its `label`.
    """

    def __init__(
        self,
        *,
        salt: CacheSalt,
        block_size: int,
        limit: int | None = None,
        roots: TenantRoots | None = None,
        label: str = "",
    ) -> None:
        self.salt, self.block_size = salt, block_size
        self.limit, self._roots, self._label = limit, roots, label
        self._prompt: tuple[int, ...] | NamedTokens = ()
        self._border = 0
        """Tokens up to here are read from `_prompt`, those behind it from `_data`."""
        self._data = bytearray()
        self._tokens = 0
        self._depths, self._states = [0], [keyed_state(salt)]

    def extend(self, token_ids: SupportsTokens, tokens: int) -> None:
        """The sequence has `tokens` tokens now."""
        end = tokens if self.limit is None else min(tokens, self.limit)
        if end <= self._tokens:
            return
        if self._is_prompt(token_ids):
            self._refer(token_ids, end // self.block_size)
        else:
            self._data += token_bytes(token_ids[self._tokens : end])
            self._tokens = end
        if self._roots is not None and self._tokens >= self.block_size:
            self._roots.note(self.at(0), self._label)

    def _is_prompt(self, token_ids: SupportsTokens) -> TypeGuard[tuple[int, ...] | NamedTokens]:
        """It can be read later; nothing came behind it yet."""
        is_first = not self._tokens or (token_ids is self._prompt and not self._data)
        return is_first and isinstance(token_ids, tuple | NamedTokens)

    def _refer(self, prompt: tuple[int, ...] | NamedTokens, blocks: int) -> None:
        """Its full blocks are read when their names are asked for."""
        self._prompt, self._border = prompt, blocks * self.block_size
        self._tokens = self._border
        if isinstance(prompt, NamedTokens) and blocks:
            state = keyed_state(self.salt).copy()
            state.update(prompt.name(blocks - 1, self.block_size, self.salt))
            self._depths, self._states = [blocks], [state]

    def begin(self, spec: RequestSpec) -> HashChain:
        """The request begins with all blocks that it has."""
        self.extend(spec.prompt_ids, len(spec.prompt_ids))
        if spec.emitted_ids:
            self.extend(spec.context_ids, spec.context_tokens)
        return self

    def full(self, tokens: int) -> ChainNames:
        """The names of the blocks that the first `tokens` tokens fill, as far as they exist."""
        return ChainNames(self, min(tokens, self._tokens) // self.block_size)

    def at(self, depth: int) -> BlockHash:
        if (prompt := self._naming(depth)) is not None:
            return prompt.name(depth, self.block_size, self.salt)
        return BlockHash(self._state(depth + 1).digest())

    def packed(self, first: int, end: int) -> bytes:
        """The names of the blocks from depth `first` to before `end`."""
        named = b""
        if first < end and (prompt := self._naming(first)) is not None:
            border = min(end, self._border // self.block_size)
            named = prompt.names(range(first, border), self.block_size, self.salt).packed
            first = border
        if first >= end:
            return named
        if end - first == 1:
            return named + self._state(end).digest()
        state = self._state(first).copy()
        packed = packed_hashes(state, self._read(first, end), self.block_size)
        self._keep(end, state)
        return named + packed

    def _naming(self, depth: int) -> NamedTokens | None:
        """The prompt, if it knows the block's name itself."""
        is_named = depth * self.block_size < self._border and isinstance(self._prompt, NamedTokens)
        return self._prompt if is_named and isinstance(self._prompt, NamedTokens) else None

    def _state(self, depth: int) -> blake2b:
        """It has hashed all tokens before this depth."""
        index = bisect_right(self._depths, depth) - 1
        if self._depths[index] == depth:
            return self._states[index]
        state = self._states[index].copy()
        state.update(self._read(self._depths[index], depth))
        self._keep(depth, state)
        return state

    def _keep(self, depth: int, state: blake2b) -> None:
        index = bisect_right(self._depths, depth)
        if self._depths[index - 1] == depth:
            return
        self._depths.insert(index, depth)
        self._states.insert(index, state)
        if len(self._depths) > _MOST_STATES:
            del self._depths[1:-1:2], self._states[1:-1:2]

    def _read(self, first: int, end: int) -> bytes:
        """The bytes of the tokens of these blocks."""
        start, stop = first * self.block_size, end * self.block_size
        if stop <= self._border:
            return token_bytes(self._prompt[start:stop])
        before = token_bytes(self._prompt[start : self._border]) if start < self._border else b""
        skipped = max(0, start - self._border) * TOKEN_BYTES
        return before + bytes(self._data[skipped : (stop - self._border) * TOKEN_BYTES])

    def told_to(self, roots: TenantRoots, label: str) -> HashChain:
        self._roots, self._label = roots, label
        return self

    def copy(self) -> HashChain:
        """Another sequence's chain, which has the same tokens so far."""
        other = copy(self)
        other._data = bytearray(self._data)
        other._depths, other._states = [*self._depths], [*self._states]
        return other


_MOST_STATES = 64


class ChainNames:
    """The names of a chain's first blocks."""

    __slots__ = ("_blocks", "_chain")

    def __init__(self, chain: HashChain, blocks: int) -> None:
        self._chain, self._blocks = chain, blocks

    def __len__(self) -> int:
        return self._blocks

    def at(self, depth: int) -> BlockHash:
        return self._chain.at(depth)

    def packed_from(self, depth: int) -> bytes:
        return self._chain.packed(depth, self._blocks)

    def until(self, depth: int) -> ChainNames:
        return ChainNames(self._chain, min(depth, self._blocks))

    def hashes(self) -> BlockHashes:
        """All of them, made now."""
        return BlockHashes(self._chain.packed(0, self._blocks))
