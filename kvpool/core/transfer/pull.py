"""The messages by which a worker reads cached blocks of another worker, as values. Pure.

    puller                                  worker that has the blocks
      PullWanted(hashes)  --------------->  more names of the chain may follow
      PullWanted(the last hashes)  ------>  holds the chain's blocks that it has
                          <---------------  PullGranted(places of the first page)
      reads the page into blocks of its own
      PullRead            --------------->
                          <---------------  PullGranted(places of the next page)
      reads it
      PullRead(over)      --------------->  releases them
                          <---------------  PullSettled(held all the time?)

Names and places of a page fit into one message each, so a chain may have any length.

The reads are one-sided, like those of a handoff, and end in the same way. Only the holder knows
whether it still held the blocks when the last one had been read. So the bytes are used only after
PullSettled confirms it. The lease begins anew with each page; a holder whose lease has ended before
grants no other page. It may release the blocks at any time, and does so when the puller is lost or
silent for too long. Whatever goes wrong, the puller computes the KV itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpool.core.layout.hashes import BlockHash
from kvpool.core.layout.layout import KvLayout, Tables
from kvpool.core.layout.shards import Shard, ShardLayout
from kvpool.core.transfer.piece import PieceBlocks, span_tokens_most
from kvpool.core.transfer.plan import cut
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.write import Side, SlabWrite, TokenSpan
from kvrelay.types import Incarnation

HASHES_MOST = 1792
"""The number of hashes that fit into a message of 64 KiB."""
_ANY_SIZE_BYTES = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class PullWanted:
    """`pull` counts the sender's pulls. `hashes` are the next ones of a chain, from its start;
    `more` follow in other messages. The sender has the first `skip` blocks."""

    pull: int
    hashes: tuple[BlockHash, ...]
    skip: int
    more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PullGranted:
    """The chain's first `blocks` are here, and none of use if 0. `held` gives the places of those
    before `end` that come after the page before, or after the skipped ones."""

    pull: int
    blocks: int = 0
    end: int = 0
    held: tuple[PieceBlocks, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRead:
    """No read is in flight. `over`: none will follow; otherwise the next page is wanted."""

    pull: int
    over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSettled:
    """`held` False: the read bytes are useless."""

    pull: int
    held: bool


PullMessage = PullWanted | PullGranted | PullRead | PullSettled


@dataclass(frozen=True, slots=True, kw_only=True)
class PullBlocks:
    """Read `write` from `source`, slots of the peer's pool `kv`, into this worker's own blocks.
    Ends in BlocksPulled."""

    peer: Incarnation
    pull: int
    write: SlabWrite
    kv: KvFacts
    source: Side
    tables: Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksPulled:
    """A transfer thread has read them (`error` None), or failed."""

    pull: int
    bytes: int
    seconds: float
    error: str | None = None


def pulled_writes(
    layout: KvLayout, page: range, blocks: int, most_bytes: int = _ANY_SIZE_BYTES
) -> tuple[SlabWrite, ...]:
    """The blocks `page` of a chain's first `blocks`, each whole if the token after the chain sees
    any of it, in writes of at most `most_bytes`; at most one write without a limit."""
    size = layout.block_size
    span = TokenSpan(start=page.start * size, tokens=len(page) * size, next_position=blocks * size)
    one = ShardLayout(model=_seen_by_block(layout, blocks * size), shard=Shard())
    return cut(one, one, span=span, staging_bytes=most_bytes)


def _seen_by_block(layout: KvLayout, end: int) -> KvLayout:
    """The layout with its windows extended to whole blocks for the token at `end`."""
    size = layout.block_size
    groups = (
        replace(group, window=group.window and end - group.first_block(end, size) * size + 1)
        for group in layout.groups
    )
    return replace(layout, groups=tuple(groups))


def page_blocks_most(layout: KvLayout) -> int:
    """The places of more blocks could exceed one message."""
    return span_tokens_most(layout) // layout.block_size
