"""How a prefill and a decode worker hand one request over, as values. Pure.

    prefill worker                          decode worker
      SlabWanted(piece)  ------------------>  lends a slab when one is free
                         <------------------  SlabLent(piece)
      gathers, writes, SlabFilled  -------->  scatters into the blocks it reserved
      Commit(first tokens)  --------------->  joins the running batch
      frees its blocks   <------------------  Committed

Either side may end it early: the decode worker says CancelTransfer, the prefill worker says
TransferCancelled once no write of it is in flight. That is the fence: until it comes (or the lease
ends and the slab is retired), the slab is not reused.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.layout import Tables
from kvpool.slabs import LeaseId, SlabId
from kvrelay.types import Incarnation, RequestKey

# --- between peers ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHello:
    wire_version: int
    incarnation: Incarnation
    fingerprint: str
    physical_format: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabWanted:
    key: RequestKey
    piece: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabLent:
    key: RequestKey
    piece: int
    slab_id: SlabId
    region: str
    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabFilled:
    key: RequestKey
    piece: int
    slab_id: SlabId
    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Token 0 of each choice; `finished_choices` ended with it and need no decoding."""

    key: RequestKey
    pieces: int
    first_token_ids: tuple[int, ...]
    finished_choices: tuple[int, ...] = ()


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


PeerMessage = (
    PeerHello
    | SlabWanted
    | SlabLent
    | SlabFilled
    | Commit
    | Committed
    | CancelTransfer
    | TransferCancelled
    | RenewLeases
)


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
class SendPeer:
    """`address` lets the shell connect first; None answers on the peer's own connection."""

    peer: Incarnation
    message: PeerMessage
    address: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSlab:
    """Gather tokens `[start, start + tokens)` and write them into the lent slab."""

    peer: Incarnation
    lent: SlabLent
    tables: Tables
    start: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterSlab:
    """Check a filled slab and scatter it into this worker's own blocks."""

    filled: SlabFilled
    tables: Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceSlab:
    """Its writer fell silent: deregister the region and register a fresh one in its place."""

    slab_id: SlabId


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabReplaced:
    slab_id: SlabId
    region: str
