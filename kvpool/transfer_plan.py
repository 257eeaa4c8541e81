"""What travels from one rank's pool to another's, cut into slabs. Pure.

The cut depends on the two layouts and the tokens alone, never on block tables, so both workers
reach the same one and each plans only its own copies. Groups with a window send only what the
window still shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvpool.layout import KvLayout, Tables
from kvpool.plan import TokenRun, token_runs
from kvpool.reslice import GroupSlice, reslice
from kvpool.shard import Shard, ShardLayout
from kvrelay.errors import ConfigError

WRITE_TOKENS = 128
"""Fewer tokens in a write cost more per byte than they save in waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Tokens `[start, start + tokens)` of a sequence whose next query is at `next_position`."""

    start: int
    tokens: int
    next_position: int

    def seen(self, window: int | None) -> range:
        """Those that the next query, or one after it, still sees; a window counts the query."""
        visible = 0 if window is None else self.next_position - window + 1
        end = self.start + self.tokens
        return range(min(max(self.start, visible), end), end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One group's tokens `[start, start + tokens)` at `offset_bytes` of a slab's payload.

    In the slab: for each layer of `part`, for each plane, `[token, head, dim]`.
    """

    part: GroupSlice
    start: int
    tokens: int
    offset_bytes: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One slab's payload: sections one after another, without gaps."""

    sections: tuple[Section, ...]

    @property
    def nbytes(self) -> int:
        return sum(section.nbytes for section in self.sections)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Where the sequence lies in one rank's pool."""

    tables: Tables
    block_size: int

    def runs(self, section: Section) -> tuple[TokenRun, ...]:
        """The copies between pool and section, adjacent blocks merged; positions are from the
        section's first token."""
        table = self.tables[section.part.group]
        return token_runs(table, section.start, section.tokens, self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """Gather each write's sections by `source.runs`, move it, scatter by `target.runs`."""

    writes: tuple[Write, ...]
    source: Side
    target: Side

    @property
    def nbytes(self) -> int:
        return sum(write.nbytes for write in self.writes)


def plan(
    src_blocks: Tables,
    dst_blocks: Tables,
    src_layout: ShardLayout,
    dst_layout: ShardLayout,
    *,
    span: TokenSpan,
    staging_bytes: int,
) -> TransferPlan:
    """Moves `span` from one rank to another; each target slot that it needs is written once.

    Raises ConfigError as `cut` does.
    """
    return TransferPlan(
        writes=cut(src_layout, dst_layout, span=span, staging_bytes=staging_bytes),
        source=Side(tables=src_blocks, block_size=src_layout.model.block_size),
        target=Side(tables=dst_blocks, block_size=dst_layout.model.block_size),
    )


def cut(
    source: ShardLayout, target: ShardLayout, *, span: TokenSpan, staging_bytes: int
) -> tuple[Write, ...]:
    """The writes, each of at most `staging_bytes` of payload, and at most 1 + twice as many of them
    as the bytes alone need.

    A section has at least 128 tokens, or all that its group sends, wherever staging holds twice
    that of one layer. Raises ConfigError if it doesn't hold one token of one layer, or if a
    tensor parallel degree can't split the heads.
    """
    assert source.model.dtype == target.model.dtype, (source.model.dtype, target.model.dtype)
    writes: list[Write] = []
    room = 0
    for section in _sections(source, target, span, staging_bytes):
        if section.nbytes > room:
            writes.append(Write(sections=()))
            room = staging_bytes
        placed = replace(section, offset_bytes=staging_bytes - room)
        writes[-1] = Write(sections=(*writes[-1].sections, placed))
        room -= section.nbytes
    return tuple(writes)


def whole_write(layout: KvLayout, start: int, tokens: int) -> Write:
    """Tokens `[start, start + tokens)` of every layer and head between equal ranks, in one write.

    The slab holds the groups one after another; those with a window keep all their tokens.
    """
    one = ShardLayout(model=layout, shard=Shard())
    span = TokenSpan(start=start, tokens=tokens, next_position=start)  # all windows still open
    writes = cut(one, one, span=span, staging_bytes=layout.bytes_per_token * tokens)
    return writes[0] if writes else Write(sections=())


def _sections(
    source: ShardLayout, target: ShardLayout, span: TokenSpan, staging_bytes: int
) -> Iterator[Section]:
    for part in reslice(source, target):
        seen = span.seen(source.model.groups[part.group].window)
        row_bytes = part.elements_per_token_layer * source.model.element_bytes
        if seen:
            yield from _group_sections(part, seen, row_bytes, staging_bytes)


def _group_sections(
    part: GroupSlice, seen: range, row_bytes: int, staging_bytes: int
) -> Iterator[Section]:
    """As many layers as 128 tokens leave room for, then as many tokens as fit; even pieces.

    `row_bytes` is one token of one layer.
    """
    if row_bytes > staging_bytes:
        raise ConfigError(
            f"transfer.staging_bytes {staging_bytes} holds not one token of one layer; it must "
            f"be at least {row_bytes}, better {row_bytes * WRITE_TOKENS * part.layers}"
        )
    layers_fit = max(1, staging_bytes // (row_bytes * _least_tokens(len(seen))))
    for layers in _even_pieces(range(part.layers), layers_fit):
        some = replace(
            part,
            source_layer=part.source_layer + layers.start,
            target_layer=part.target_layer + layers.start,
            layers=len(layers),
        )
        layer_bytes = len(layers) * row_bytes
        for tokens in _even_pieces(seen, staging_bytes // layer_bytes):
            yield Section(
                part=some,
                start=tokens.start,
                tokens=len(tokens),
                offset_bytes=0,
                nbytes=len(tokens) * layer_bytes,
            )


def _least_tokens(tokens: int) -> int:
    """The smallest piece size with which even pieces of `tokens` all have 128 (or `tokens`)."""
    return -(-tokens // max(1, tokens // WRITE_TOKENS))


def _even_pieces(whole: range, most: int) -> Iterator[range]:
    """The fewest pieces of at most `most`, their sizes within one of each other."""
    count = -(-len(whole) // most)
    for i in range(count):
        yield whole[len(whole) * i // count : len(whole) * (i + 1) // count]
