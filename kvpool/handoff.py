"""How a prefill and a decode worker hand one request over, as values. Pure.

    prefill worker                          decode worker
      PeerHello  <----------------------->  PeerHello       once per connection
      PieceAhead(piece, its blocks) ------>  chooses the way; collated:
                         <------------------  SlabLent(piece, codec), when a slab is free
      gathers, writes, SlabFilled  -------->  scatters into the blocks it reserved
                                             or direct:
                         <------------------  PieceAwaited(piece)
      PieceComputed(piece)  --------------->  reads it into the blocks it reserved
                         <------------------  PieceRead(piece)
      Commit(first tokens)  --------------->  joins the running batch
      frees its blocks   <------------------  Committed

Pieces are announced before they are computed. With `push` the decode worker holds its blocks from
the reservation on; with `pull` it takes them when the first piece is announced, or later, when it
has some: until then pieces wait.

Either side may end it early, by CancelTransfer or, once no write is in flight, TransferCancelled.
That is the fence: until it comes, or the slab is retired at its lease's end, it is not reused.

Only its owner ever writes a block. A read of blocks that were freed meanwhile finds other bytes,
but they can't be used: Commit follows PieceRead, so the owner still held every block when it heard
that the last of them had been read, however late anyone is, and without Commit no request joins.
So the owner frees its blocks whenever it likes, and no clock is trusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvpool.canary import LogitSketch
from kvpool.codec import Codec
from kvpool.layout import Tables
from kvpool.link_cost import LinkCost
from kvpool.piece import Piece, PieceBlocks
from kvpool.pool_map import KvFacts
from kvpool.pull import PullMessage
from kvpool.slabs import LeaseId, SlabId
from kvpool.transfer_plan import Side, Write
from kvrelay.types import Incarnation, RequestKey


class HandoffMode(StrEnum):
    """`push`: pieces leave as they are computed, into blocks leased before. `pull`: they leave so
    as soon as the decode worker has room. `pool`: through the host's pool node."""

    PUSH = "push"
    PULL = "pull"
    POOL = "pool"


# --- between peers ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHello:
    wire_version: int
    incarnation: Incarnation
    fingerprint: str
    kv: KvFacts
    name: str = ""
    probe_region: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceAhead:
    """`number` counts the request's pieces; `held` are the sender's blocks, fixed until the end."""

    key: RequestKey
    number: int
    piece: Piece
    held: tuple[PieceBlocks, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabLent:
    key: RequestKey
    piece: int
    slab_id: SlabId
    region: str
    lease_id: LeaseId
    codec: Codec = Codec.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabFilled:
    key: RequestKey
    piece: int
    slab_id: SlabId
    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceAwaited:
    """Not into a slab: say when it is computed, it will be read where it lies."""

    key: RequestKey
    piece: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceComputed:
    key: RequestKey
    piece: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRead:
    key: RequestKey
    piece: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Token 0 of each choice; `finished_choices` ended with it and need no decoding. With the
    `sketch` of the logits that they were drawn from, the KV is checked before it is used."""

    key: RequestKey
    pieces: int
    first_token_ids: tuple[int, ...]
    finished_choices: tuple[int, ...] = ()
    sketch: LogitSketch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTransfer:
    key: RequestKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCancelled:
    key: RequestKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewLeases:
    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """How long does a message take? Links answer it themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbed:
    """The side that was connected to has measured the link: now the other one may."""


PeerMessage = (
    PeerHello
    | PieceAhead
    | SlabLent
    | SlabFilled
    | PieceAwaited
    | PieceComputed
    | PieceRead
    | Commit
    | Committed
    | CancelTransfer
    | TransferCancelled
    | RenewLeases
    | Ping
    | Pong
    | LinkProbed
    | PullMessage
)

TO_PREFILL = (SlabLent, PieceAwaited, PieceRead, Committed, CancelTransfer)
"""What a decode worker says; all but the hello, which either says, is the prefill worker's."""


# --- a worker's own events and commands ---------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FromPeer:
    """What a peer said, with who it is."""

    peer: Incarnation
    message: PeerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost:
    peer: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabWritten:
    """The transfer thread has written a piece and told the peer so (`error` None), or failed."""

    key: RequestKey
    piece: int
    bytes: int
    seconds: float
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasured:
    """What the link to a connected peer costs; until it is known slabs are used."""

    peer: Incarnation
    cost: LinkCost
    name: str = ""


@dataclass(frozen=True, slots=True)
class LayersWritten:
    """The running step has written the KV of all layers up to this one."""

    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabScattered:
    """The transfer thread has checked and scattered a slab (`error` None), or refused it."""

    key: RequestKey
    piece: int
    slab_id: SlabId
    lease_id: LeaseId
    bytes: int
    seconds: float
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceFetched:
    """The transfer thread has read a piece out of the peer's blocks, or failed."""

    key: RequestKey
    piece: int
    bytes: int
    seconds: float
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPeer:
    """`addresses`, one per transport of the peer, let the shell connect first; without any the
    answer goes over the connection that there is."""

    peer: Incarnation
    message: PeerMessage
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSlab:
    """Gather a piece out of the blocks of `tables` and write it into the lent slab."""

    peer: Incarnation
    lent: SlabLent
    piece: Piece
    write: Write
    tables: Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterSlab:
    """Check a slab that `peer` has filled and scatter it into this worker's own blocks."""

    peer: Incarnation
    filled: SlabFilled
    piece: Piece
    write: Write
    tables: Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPiece:
    """Read a piece from `source`, slots of the peer's pool `kv`, into this worker's own blocks."""

    peer: Incarnation
    key: RequestKey
    piece: int
    write: Write
    kv: KvFacts
    source: Side
    tables: Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceSlab:
    """Its writer fell silent: deregister the region and register a fresh one in its place."""

    slab_id: SlabId


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabReplaced:
    slab_id: SlabId
    region: str
