"""How a prefill and a decode worker hand one request over, as values. Pure.

    prefill worker                          decode worker
      PeerHello  <----------------------->  PeerHello       once per connection
      PiecesAhead(pieces, blocks) -------->  chooses each one's way; collated:
                         <------------------  SlabLent(piece, codec), when a slab is free
      gathers, writes, SlabFilled  -------->  scatters into the blocks it reserved
                                             or direct:
                         <------------------  PiecesAwaited(pieces)
      PieceComputed(piece)  --------------->  reads it into the blocks it reserved
                         <------------------  PiecesRead(pieces), when none is left to read
      Commit(first tokens)  --------------->  joins the running batch
      frees its blocks   <------------------  Committed

Pieces are announced before they are computed. With `push` the decode worker holds its blocks from
the reservation on; with `pull` it takes them when the first piece is announced, or later, when it
has some: until then pieces wait.

Either side may end it early, by CancelTransfer or, once no write is in flight, TransferCancelled.
That is the fence: until it comes, or the slab is retired at its lease's end, it is not reused.

Only its owner ever writes a block. A read of blocks that were freed meanwhile finds other bytes,
but they can't be used: Commit follows PiecesRead, so the owner still held every block when it heard
that the last of them had been read, however late anyone is, and without Commit no request joins.
So the owner frees its blocks whenever it likes, and no clock is trusted.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from kvpool.canary import KvDigest
from kvpool.codec import Codec
from kvpool.piece import Piece, PieceBlocks
from kvpool.pool.map import KvFacts
from kvpool.pull import PullMessage
from kvpool.slabs import LeaseId, SlabId
from kvrelay.types import Incarnation, RequestKey
from kvrelay.values import value


class HandoffMode(StrEnum):
    """`push`: pieces leave as they are computed, into blocks leased before. `pull`: they leave so
    as soon as the decode worker has room. `pool`: through the host's pool node."""

    PUSH = "push"
    PULL = "pull"
    POOL = "pool"


@value
class PeerHello:
    wire_version: int
    incarnation: Incarnation
    fingerprint: str
    kv: KvFacts
    name: str = ""
    probe_region: str = ""


@value
class PiecesAhead:
    """Of one span `count` pieces, from `piece` on; `number`, of the first, counts the request's
    pieces. `held` are the sender's blocks of all of them, fixed until the end."""

    key: RequestKey
    number: int
    piece: Piece
    held: tuple[PieceBlocks, ...]
    count: int = 1

    def numbered(self) -> Iterator[tuple[int, Piece]]:
        """# number, piece"""
        for i in range(self.count):
            yield self.number + i, Piece(span=self.piece.span, index=self.piece.index + i)


@value
class SlabLent:
    key: RequestKey
    piece: int
    slab_id: SlabId
    region: str
    lease_id: LeaseId
    codec: Codec = Codec.NONE


@value
class SlabFilled:
    key: RequestKey
    piece: int
    slab_id: SlabId
    lease_id: LeaseId


@value
class PiecesAwaited:
    """Not into slabs: say when each is computed, it will be read where it lies."""

    key: RequestKey
    pieces: tuple[int, ...]


@value
class PieceComputed:
    key: RequestKey
    piece: int


@value
class PiecesRead:
    key: RequestKey
    pieces: tuple[int, ...]


@value
class Commit:
    """The next token of each choice; `finished_choices` ended with it and need no decoding. With
    a `digest` the KV is checked before it is used. A request of one choice that was moved here has
    emitted `resumed_ids` since this worker was asked; the first of them is its next token."""

    key: RequestKey
    pieces: int
    first_token_ids: tuple[int, ...]
    finished_choices: tuple[int, ...] = ()
    resumed_ids: tuple[int, ...] = ()
    digest: KvDigest | None = None


@value
class Committed:
    key: RequestKey


@value
class CancelTransfer:
    key: RequestKey
    reason: str


@value
class TransferCancelled:
    key: RequestKey
    reason: str


@value
class RenewLeases:
    keys: tuple[RequestKey, ...]


@value
class Ping:
    """How long does a message take? Links answer it themselves."""


@value
class Pong:
    pass


@value
class LinkProbed:
    """The side that was connected to has measured the link: now the other one may."""


PieceMessage = PiecesAhead | SlabLent | SlabFilled | PiecesAwaited | PieceComputed | PiecesRead
EndMessage = Commit | Committed | CancelTransfer | TransferCancelled
LinkMessage = PeerHello | RenewLeases | Ping | Pong | LinkProbed
PeerMessage = PieceMessage | EndMessage | LinkMessage | PullMessage

TO_PREFILL = (SlabLent, PiecesAwaited, PiecesRead, Committed, CancelTransfer)
"""What a decode worker says; all but the hello, which either says, is the prefill worker's."""
