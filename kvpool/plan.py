"""Where a sequence's tokens lie in the pool: the copies of one gather or scatter. Pure.

A slab is laid out per token, so the two sides of a handoff may have different block sizes: each
plans its own copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvpool.layout import BlockId, KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRun:
    """Pool slots `[slot, slot + tokens)` hold slab tokens `[position, position + tokens)`."""

    slot: int
    position: int
    tokens: int


def token_runs(
    table: Sequence[BlockId], start: int, tokens: int, block_size: int
) -> tuple[TokenRun, ...]:
    """Runs for tokens `[start, start + tokens)` of the sequence whose blocks `table` lists.

    In slab order, each token exactly once; adjacent blocks merge into one run.
    """
    assert 0 <= start <= start + tokens <= len(table) * block_size, (start, tokens, len(table))
    runs: list[TokenRun] = []
    for run in _per_block(table, start, tokens, block_size):
        last = runs[-1] if runs else None
        if last is not None and last.slot + last.tokens == run.slot:
            runs[-1] = TokenRun(
                slot=last.slot, position=last.position, tokens=last.tokens + run.tokens
            )
        else:
            runs.append(run)
    return tuple(runs)


def chunk_bytes(layout: KvLayout, tokens: int) -> int:
    """Payload of a slab that holds `tokens` tokens of every layer group."""
    return layout.bytes_per_token * tokens


def _per_block(
    table: Sequence[BlockId], start: int, tokens: int, block_size: int
) -> Iterator[TokenRun]:
    token, end = start, start + tokens
    while token < end:
        block, within = divmod(token, block_size)
        count = min(block_size - within, end - token)
        yield TokenRun(
            slot=table[block] * block_size + within, position=token - start, tokens=count
        )
        token += count
