"""Events and commands of a pool node's core, as values. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NewType

from kvpool.core.layout.hashes import BlockHash
from kvpool.core.node.messages import FromPool, ToPool
from kvpool.core.node.tier_blocks import PoolPlace
from kvrelay.messages import BlockChanges
from kvrelay.types import Incarnation

RouterCall = NewType("RouterCall", int)
"""One stream to a router; a router that calls again has a new one."""

# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWorkerJoined:
    """`looks_up`: as in its PoolHello."""

    worker: Incarnation
    looks_up: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FromPoolWorker:
    worker: Incarnation
    message: ToPool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWorkerLost:
    """Its connection is gone, so it can't write any more."""

    worker: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCalled:
    """A router wants to know the blocks. It is ready for its first message."""

    router: RouterCall


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTook:
    """The router's last message is on its way; it is ready for the next one."""

    router: RouterCall


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterHungUp:
    router: RouterCall


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTick:
    """Leases may have ended. Comes several times during a lease."""


class SlotOutcome(Enum):
    WRITTEN = auto()
    DAMAGED = auto()
    """The bytes of the host place did not match the checksum."""
    FAILED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsWritten:
    batch: int
    outcomes: tuple[SlotOutcome, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsRead:
    """The xxh3_64 of each host place now; None: the slot was damaged or unreadable."""

    batch: int
    checksums: tuple[int | None, ...]


PoolEvent = (
    PoolWorkerJoined
    | FromPoolWorker
    | PoolWorkerLost
    | RouterCalled
    | RouterTook
    | RouterHungUp
    | PoolTick
    | SlotsWritten
    | SlotsRead
)

# --- commands -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TellWorker:
    worker: Incarnation
    message: FromPool


@dataclass(frozen=True, slots=True, kw_only=True)
class DropWorker:
    """It broke the protocol: send it the reason and close; WorkerLost follows."""

    worker: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TellRouter:
    """A PoolUpdate. The next one comes after RouterTook."""

    router: RouterCall
    sequence: int
    workers: tuple[Incarnation, ...]
    blocks: tuple[BlockChanges, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropRouter:
    """Send it the reason and end its stream."""

    router: RouterCall
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    hash: BlockHash
    parent: BlockHash | None
    place: PoolPlace
    checksum: int
    slot: PoolPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSlots:
    """Copies host places to disk. The host may reuse a place meanwhile. Then its bytes don't match
    the checksum, and must not be written."""

    batch: int
    spills: tuple[Spill, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLoad:
    hash: BlockHash
    slot: PoolPlace
    place: PoolPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSlots:
    """Copies slots, a chain below `parent`, into host places that are reserved for it."""

    batch: int
    parent: BlockHash | None
    loads: tuple[BlockLoad, ...]


PoolCommand = TellWorker | DropWorker | TellRouter | DropRouter | WriteSlots | ReadSlots
