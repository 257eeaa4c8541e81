"""Events and commands of a worker's handoffs, as values. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.core.layout.layout import Tables
from kvpool.core.transfer.link_cost import LinkCost
from kvpool.core.transfer.messages import PeerMessage, SlabFilled, SlabLent
from kvpool.core.transfer.piece import Piece
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.slabs import LeaseId, SlabId
from kvpool.core.transfer.write import Side, SlabWrite
from kvrelay.errors import FailureReason
from kvrelay.types import Incarnation, RequestKey, value


@value
class FromPeer:
    """A peer's message, with its sender."""

    peer: Incarnation
    message: PeerMessage


@value
class PeerLost:
    """The requests between this worker and the peer end with this `failure`."""

    peer: Incarnation
    reason: str
    failure: FailureReason = FailureReason.PEER_LOST


@value
class SlabWritten:
    """A transfer thread has written a piece and told the peer (`error` None), or failed."""

    key: RequestKey
    piece: int
    bytes: int
    seconds: float
    error: str | None = None


@value
class LinkMeasured:
    """The cost of the link to a connected peer; until it is known slabs are used."""

    peer: Incarnation
    cost: LinkCost
    name: str = ""


@dataclass(frozen=True, slots=True)
class LayersWritten:
    """The step of this number has written the KV of all layers up to this one. The step before it
    may not have been said to have ended yet."""

    layer: int
    step: int


@value
class SlabScattered:
    """A transfer thread has checked and scattered a slab (`error` None), or refused it."""

    key: RequestKey
    piece: int
    slab_id: SlabId
    lease_id: LeaseId
    bytes: int
    seconds: float
    error: str | None = None


@value
class PieceFetched:
    """A transfer thread has read a piece out of the peer's blocks, or failed."""

    key: RequestKey
    piece: int
    bytes: int
    seconds: float
    error: str | None = None


@value
class SendPeer:
    """`addresses`, one per transport of the peer, let the shell connect first. Without any the
    message goes over the existing connection."""

    peer: Incarnation
    message: PeerMessage
    addresses: tuple[str, ...] = ()


@value
class DropLink:
    """A copy with this peer takes too long: end its connection, and with it the copy. PeerLost
    follows at once, the copy's own end when it has ended. The next connection takes another
    transport, if there is one."""

    peer: Incarnation
    reason: str


@value
class WriteSlab:
    """Gather a piece out of the blocks of `tables` and write it into the lent slab."""

    peer: Incarnation
    lent: SlabLent
    piece: Piece
    write: SlabWrite
    tables: Tables


@value
class ScatterSlab:
    """Check a slab that `peer` has filled and scatter it into this worker's own blocks."""

    peer: Incarnation
    filled: SlabFilled
    piece: Piece
    write: SlabWrite
    tables: Tables


@value
class FetchPiece:
    """Read a piece from `source`, slots of the peer's pool `kv`, into this worker's own blocks."""

    peer: Incarnation
    key: RequestKey
    piece: int
    write: SlabWrite
    kv: KvFacts
    source: Side
    tables: Tables


@value
class ReplaceSlab:
    """Its writer fell silent: deregister the region and register a new one in its place."""

    slab_id: SlabId


@value
class SlabReplaced:
    slab_id: SlabId
    region: str
