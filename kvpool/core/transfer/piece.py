"""A piece of a handoff: one write of a span's cut, and its announcement. Pure.

Both workers make the same cut of a span, so a piece is named by the span and its write's index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from kvpool.core.layout.layout import NO_BLOCK, BlockId, KvLayout, Tables
from kvpool.core.layout.shards import Shard, ShardLayout
from kvpool.core.transfer.link_cost import TransferShape
from kvpool.core.transfer.plan import cut
from kvpool.core.transfer.write import (
    Side,
    SlabSection,
    SlabWrite,
    TokenPlace,
    TokenRun,
    TokenSpan,
    token_runs,
)
from kvrelay.errors import PeerError
from kvrelay.types import value

LAYER_GROUPS = 4
"""A quarter of the last chunk is left to send after its compute. Twice as many groups would save an
eighth more, and double the messages."""
LAYER_GROUP_BYTES = 256 * 1024
"""Smaller pieces take less time to move than the messages about them."""
_RUN_WIRE_BYTES = 8
_RUNS_WIRE_BYTES = 48 * 1024
"""Room for a piece's runs in a message of 64 KiB, when no two blocks are adjacent."""

Runs = tuple[tuple[int, int], ...]
"""(first block, number of blocks) of adjacent blocks, in the table's order"""


@value
class Piece:
    """The `index`-th write of the cut of `span`."""

    span: TokenSpan
    index: int


@value
class PieceBlocks:
    """The blocks that a sender holds at `[first, first + ...)` of one group's table."""

    group: int
    first: int
    runs: Runs

    @property
    def blocks(self) -> int:
        return sum([count for _, count in self.runs])


@lru_cache(maxsize=64)
def cut_span(layout: KvLayout, span: TokenSpan, slab_bytes: int) -> tuple[SlabWrite, ...]:
    """The writes of `span` between two whole models, each of at most `slab_bytes`, without a codec.

    `layout` is that of the wire (wire_layout). Layouts that differ only in their block size have
    equal cuts.
    """
    one = ShardLayout(model=layout, shard=Shard())
    groups = _layer_groups(layout, span)
    return cut(one, one, span=span, staging_bytes=slab_bytes, layer_groups=groups)


def _layer_groups(layout: KvLayout, span: TokenSpan) -> int:
    """More than one group for the tokens that end the prompt. All earlier tokens are sent while
    these are computed, so only for these it matters that early layers leave before the last one is
    done."""
    ends = span.start + span.tokens >= span.next_position
    worth = layout.bytes_per_token * span.tokens // LAYER_GROUP_BYTES
    return max(1, min(LAYER_GROUPS, worth)) if ends else 1


def check_cut(
    layout: KvLayout,
    first: Piece,
    count: int,
    slab_bytes: int,
    wanted: range,
    next_position: int,
) -> tuple[SlabWrite, ...]:
    """The writes that a peer has named, `count` from the `first` on. The prompt's tokens `wanted`,
    up to its end, are to be sent as far as the query at `next_position` sees them. Raises PeerError
    when there are no such writes."""
    span = first.span
    end = span.start + span.tokens
    if not wanted.start <= span.start <= end <= wanted.stop:
        raise PeerError(
            f"a piece of tokens [{span.start}, {end}) of {span.next_position}, but "
            f"[{wanted.start}, {wanted.stop}) of {next_position} are wanted"
        )
    if span.next_position != next_position:
        raise PeerError(f"a piece for a query at {span.next_position}, not {next_position}")
    writes = cut_span(layout, span, slab_bytes)
    behind = first.index + count
    if count < 1 or behind > len(writes):
        last = max(first.index, behind - 1)
        raise PeerError(f"piece {last} of tokens [{span.start}, {end}) has nothing to send")
    return writes[first.index : behind]


def span_tokens_most(layout: KvLayout) -> int:
    """A longer span could have more blocks than one message can name."""
    runs = _RUNS_WIRE_BYTES // _RUN_WIRE_BYTES // len(layout.groups)
    return (runs - 1) * layout.block_size


def piece_blocks(
    sections: Iterable[SlabSection], tables: Tables, block_size: int
) -> tuple[PieceBlocks, ...]:
    """The blocks that hold the sections' tokens."""
    return tuple(
        PieceBlocks(group=group, first=first, runs=_runs(tables[group][first:end]))
        for group, first, end in _block_ranges(sections, block_size)
    )


def source_side(
    sections: Iterable[SlabSection],
    held: Sequence[PieceBlocks],
    *,
    groups: int,
    block_size: int,
    blocks: int,
) -> Side:
    """The places of the sections' tokens at a peer with `blocks` blocks of `block_size`.

    Raises PeerError unless its announcement is complete.
    """
    by_group = {one.group: one for one in held}
    for group, first, end in _block_ranges(sections, block_size):
        said = by_group.get(group)
        if said is None or (said.first, said.first + said.blocks) != (first, end):
            raise PeerError(f"a piece whose blocks [{first}, {end}) of group {group} are not named")
        if any(start + count > blocks for start, count in said.runs):
            raise PeerError(f"a piece names blocks outside a pool of {blocks} blocks")
    tables = tuple(_table(by_group.get(group)) for group in range(groups))
    return Side(tables=tables, block_size=block_size)


def holds(side: Side, sections: Iterable[SlabSection]) -> bool:
    """True if each of the tokens has a slot."""
    return all(
        NO_BLOCK not in side.tables[group][first:end] and end <= len(side.tables[group])
        for group, first, end in _block_ranges(sections, side.block_size)
    )


class PairedRun(NamedTuple):
    """Source slots `[source, source + tokens)` belong into the target's slots from `target` on."""

    source: int
    target: int
    tokens: int


def paired_runs(section: SlabSection, source: Side, target: Side) -> tuple[PairedRun, ...]:
    """The copies of a section from pool to pool, adjacent slots merged on both sides."""
    return _runs_between(source.place(section), target.place(section))


@lru_cache(maxsize=256)
def _runs_between(source: TokenPlace, target: TokenPlace) -> tuple[PairedRun, ...]:
    """The layers of tokens have the same arrangement."""
    return tuple(_paired(token_runs(*source), token_runs(*target)))


def _paired(sources: Sequence[TokenRun], targets: Sequence[TokenRun]) -> Iterator[PairedRun]:
    theirs, ours = iter(sources), iter(targets)
    left, right = next(theirs, None), next(ours, None)
    at = 0
    while left is not None and right is not None:
        end = min(left.position + left.tokens, right.position + right.tokens)
        yield PairedRun(left.slot + at - left.position, right.slot + at - right.position, end - at)
        at = end
        if at == left.position + left.tokens:
            left = next(theirs, None)
        if at == right.position + right.tokens:
            right = next(ours, None)


def transfer_shape(
    write: SlabWrite, source: Side, target: Side, ranks: tuple[int, int] = (1, 1)
) -> TransferShape:
    """`ranks`: the number that share the heads at the source and at the target. If they differ, a
    token's heads are apart at one of the ends, and each is read by itself."""
    descriptors = source_runs = target_runs = 0
    for section in write.sections:
        theirs, ours = source.runs(section), target.runs(section)
        pairs = len(paired_runs(section, source, target))
        for plane in section.part.planes:
            alike = min(ranks[0], plane.heads) == min(ranks[1], plane.heads)
            reads = pairs if alike else section.tokens
            descriptors += section.part.layers * _shares(*ranks, plane.heads) * reads
        source_runs += len(theirs)
        target_runs += len(ours)
    return TransferShape(
        nbytes=write.nbytes,
        descriptors=descriptors,
        source_runs=source_runs,
        target_runs=target_runs,
    )


def _shares(theirs: int, ours: int, heads: int) -> int:
    """Pairs of a source's and a target's rank where one sends some of the heads to the other."""
    senders = min(theirs, heads)
    return senders + ours - gcd(senders, ours)


def _block_ranges(
    sections: Iterable[SlabSection], block_size: int
) -> Iterator[tuple[int, int, int]]:
    """(group, first, end): the entries of the group's table for the sections' tokens."""
    tokens: dict[int, tuple[int, int]] = {}  # group |-> [first, end)
    for section in sections:
        first, end = section.start, section.start + section.tokens
        known = tokens.get(section.part.group, (first, end))
        tokens[section.part.group] = (min(first, known[0]), max(end, known[1]))
    for group, (first, end) in sorted(tokens.items()):
        yield group, first // block_size, -(-end // block_size)


@lru_cache(maxsize=64)
def _runs(blocks: tuple[BlockId, ...]) -> Runs:
    assert NO_BLOCK not in blocks, "a block that is to be sent is not held"
    begins = [i for i, block in enumerate(blocks) if not i or block != blocks[i - 1] + 1]
    ends = (*begins[1:], len(blocks))
    return tuple((blocks[begin], end - begin) for begin, end in zip(begins, ends, strict=True))


@lru_cache(maxsize=64)
def _table(held: PieceBlocks | None) -> tuple[BlockId, ...]:
    if held is None:
        return ()
    blocks = [BlockId(start + i) for start, count in held.runs for i in range(count)]
    return (NO_BLOCK,) * held.first + tuple(blocks)
