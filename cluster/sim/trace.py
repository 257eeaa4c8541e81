"""Requests as a trace tells of them: when, how long, which blocks of the prompt are equal. Pure.

Nothing of the prompts' length is ever built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import overload

from kvpool.hashes import BlockHash, CacheSalt, NamedTokens

HASH_TOKENS = 512
"""Tokens that one hash id of a trace stands for."""
_MIX = 2654435761
_IDS = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """`hash_ids` name the prompt's blocks of `hash_tokens` tokens (the last may be shorter): equal
    ids, equal prompts up to the block's end. None: it is like no other."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    hash_tokens: int = HASH_TOKENS
    tenant: str = ""


class TracePrompt(NamedTokens):
    """`number` is the request's own; `copy` tells a replica's prompts from those of the others."""

    def __init__(self, request: TraceRequest, number: int, copy: int = 0) -> None:
        self._length = request.input_tokens
        self._hash_ids = request.hash_ids
        self._hash_tokens = request.hash_tokens
        self._number = number
        self._copy = copy
        self._named: tuple[CacheSalt, int] | None = None
        self._names: list[BlockHash] = []

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        if isinstance(at, slice):
            return _Part(self, range(self._length)[at])
        position = range(self._length)[at]
        return (self._id(position) * _MIX + position) % _IDS

    def iterate(self, positions: range) -> Iterator[int]:
        """The token ids there."""
        size = self._hash_tokens
        blocks = range(positions.start // size, -(-positions.stop // size))
        return chain.from_iterable(self._of_block(block * size, positions) for block in blocks)

    def _of_block(self, first: int, positions: range) -> list[int]:
        mixed = self._id(first) * _MIX
        start, stop = max(first, positions.start), min(first + self._hash_tokens, positions.stop)
        return [(mixed + position) % _IDS for position in range(start, stop)]

    def _id(self, position: int) -> int:
        if self._hash_ids is None:
            return _IDS + self._number
        return self._hash_ids[position // self._hash_tokens] * 131 + self._copy

    def names(self, blocks: range, block_size: int, salt: CacheSalt) -> Sequence[BlockHash]:
        if self._named != (salt, block_size):
            self._named = (salt, block_size)
            self._names = self._all_names(block_size, salt)
        return self._names[blocks.start : blocks.stop]

    def _all_names(self, block_size: int, salt: CacheSalt) -> list[BlockHash]:
        blocks, mark = range(self._length // block_size), salt[:8]
        if self._hash_ids is None:
            own = mark + b"own" + self._number.to_bytes(8)
            return [BlockHash(own + block.to_bytes(4)) for block in blocks]
        ends = ((block + 1) * block_size for block in blocks)
        mark += self._copy.to_bytes(4)
        return [BlockHash(mark + self._end_name(self._hash_ids, end)) for end in ends]

    def _end_name(self, hash_ids: Sequence[int], end: int) -> bytes:
        """Equal for equal tokens before `end`: the block of the trace that it lies in, and where.
        The last one tells of all before it."""
        block, within = divmod(end - 1, self._hash_tokens)
        return hash_ids[block].to_bytes(8) + (within + 1).to_bytes(2)


class _Part(Sequence[int]):
    """Some of a prompt's tokens."""

    def __init__(self, prompt: TracePrompt, positions: range) -> None:
        self._prompt = prompt
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[int]:
        return self._prompt.iterate(self._positions)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        if isinstance(at, slice):
            return _Part(self._prompt, self._positions[at])
        return self._prompt[self._positions[at]]
