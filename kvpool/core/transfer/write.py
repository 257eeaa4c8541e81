"""The KV that one write moves from one rank's pool to another's, and its places at both ends. Pure.

A slab is laid out per token, so the two sides of a handoff may have different block sizes: each
plans its own copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from kvpool.core.layout.codec import Codec, WireFormat
from kvpool.core.layout.layout import BlockId, KvLayout, Tables
from kvpool.core.layout.shards import GroupSlice
from kvrelay.types import value


@value
class TokenRun:
    """Pool slots `[slot, slot + tokens)` hold slab tokens `[position, position + tokens)`."""

    slot: int
    position: int
    tokens: int


TokenPlace = tuple[tuple[BlockId, ...], int, int, int]
"""The arguments of token_runs."""


@lru_cache(maxsize=256)
def token_runs(
    table: tuple[BlockId, ...], start: int, tokens: int, block_size: int
) -> tuple[TokenRun, ...]:
    """Runs for tokens `[start, start + tokens)` of the sequence with these blocks in its `table`.

    In slab order, each token exactly once; adjacent blocks merge into one run. The layers of a span
    have the same runs and are asked for one after another, so results are cached.
    """
    assert 0 <= start <= start + tokens <= len(table) * block_size, (start, tokens, len(table))
    return tuple(_merged(table, start, start + tokens, block_size)) if tokens else ()


def chunk_bytes(layout: KvLayout, tokens: int) -> int:
    """Payload of a slab that holds `tokens` tokens of every layer group."""
    return layout.bytes_per_token * tokens


def _merged(table: Sequence[BlockId], start: int, end: int, block_size: int) -> Iterator[TokenRun]:
    """A run continues while each block follows the one before it."""
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


@value
class TokenSpan:
    """Tokens `[start, start + tokens)` of a sequence whose next query is at `next_position`."""

    start: int
    tokens: int
    next_position: int

    def seen(self, window: int | None) -> range:
        """The tokens that the next query, or a later one, still sees; a window includes the
        query."""
        visible = 0 if window is None else self.next_position - window + 1
        end = self.start + self.tokens
        return range(min(max(self.start, visible), end), end)


@value
class SlabSection:
    """One group's tokens `[start, start + tokens)` at `offset_bytes` of a slab's payload, in the
    format of `kvpool.core.layout.codec`. `last_layer` is the model's index of its last layer."""

    part: GroupSlice
    last_layer: int
    start: int
    tokens: int
    offset_bytes: int
    nbytes: int

    def encoded(self, wire: WireFormat, offset_bytes: int) -> SlabSection:
        shape = [(plane.heads, plane.dim) for plane in self.part.planes]
        nbytes = wire.encoded_bytes(self.part.layers, self.tokens, shape)
        return replace(self, offset_bytes=offset_bytes, nbytes=nbytes)


@value
class SlabWrite:
    """One slab's payload: consecutive sections without gaps, all in one format."""

    sections: tuple[SlabSection, ...]
    wire: WireFormat

    @property
    def nbytes(self) -> int:
        return sum([section.nbytes for section in self.sections])

    @property
    def last_layer(self) -> int:
        """After this layer of the model a write that isn't empty may be gathered."""
        return max(section.last_layer for section in self.sections)

    def encoded(self, codec: Codec) -> SlabWrite:
        """The same tokens of the same layers with another codec. With tiny heads a codec may need
        more bytes than none."""
        if codec is self.wire.codec:
            return self
        wire = replace(self.wire, codec=codec)
        sections: list[SlabSection] = []
        for section in self.sections:
            offset_bytes = sum(before.nbytes for before in sections)
            sections.append(section.encoded(wire, offset_bytes))
        return SlabWrite(sections=tuple(sections), wire=wire)


@value
class Side:
    """The sequence's place in one rank's pool."""

    tables: Tables
    block_size: int

    def runs(self, section: SlabSection) -> tuple[TokenRun, ...]:
        """The copies between pool and section, with adjacent blocks merged; positions count from
        the section's first token."""
        return token_runs(*self.place(section))

    def place(self, section: SlabSection) -> TokenPlace:
        """The entries of the table that the section needs."""
        first, within = divmod(section.start, self.block_size)
        last = -(-(section.start + section.tokens) // self.block_size)
        table = self.tables[section.part.group][first:last]
        return table, within, section.tokens, self.block_size
