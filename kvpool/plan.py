"""Where a sequence's tokens lie in the pool: the copies of one gather or scatter. Pure.

A slab is laid out per token, so the two sides of a handoff may have different block sizes: each
plans its own copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from kvpool.layout import BlockId, KvLayout
from kvrelay.values import value


@value
class TokenRun:
    """Pool slots `[slot, slot + tokens)` hold slab tokens `[position, position + tokens)`."""

    slot: int
    position: int
    tokens: int


TokenPlace = tuple[tuple[BlockId, ...], int, int, int]
"""What token_runs is asked."""


@lru_cache(maxsize=256)
def token_runs(
    table: tuple[BlockId, ...], start: int, tokens: int, block_size: int
) -> tuple[TokenRun, ...]:
    """Runs for tokens `[start, start + tokens)` of the sequence whose blocks `table` lists.

    In slab order, each token exactly once; adjacent blocks merge into one run. The layers of a span
    lie alike, and are asked for one after another.
    """
    assert 0 <= start <= start + tokens <= len(table) * block_size, (start, tokens, len(table))
    return tuple(_merged(table, start, start + tokens, block_size)) if tokens else ()


def chunk_bytes(layout: KvLayout, tokens: int) -> int:
    """Payload of a slab that holds `tokens` tokens of every layer group."""
    return layout.bytes_per_token * tokens


def _merged(table: Sequence[BlockId], start: int, end: int, block_size: int) -> Iterator[TokenRun]:
    """A run goes on while each block is the one behind the last."""
    first, begin = start // block_size, start
    previous = table[first]
    for index in range(first + 1, -(-end // block_size)):
        if table[index] != previous + 1:
            yield _run(table, begin, index * block_size, start, block_size)
            begin = index * block_size
        previous = table[index]
    yield _run(table, begin, end, start, block_size)


def _run(table: Sequence[BlockId], begin: int, end: int, start: int, block_size: int) -> TokenRun:
    block, within = divmod(begin, block_size)
    slot = table[block] * block_size + within
    return TokenRun(slot=slot, position=begin - start, tokens=end - begin)
