"""The messages between a worker and a pool node, as values. Pure.

    worker                                   pool node
      PoolHello  ------------------------->  PoolWelcome, or PoolRefused
      StoreWanted  ----------------------->  finds room for missing blocks
                   <-----------------------  StoreGranted(places)
      gathers, writes, Stored  ----------->  readable from now on
                   <-----------------------  StoreConfirmed
      FetchWanted  ----------------------->  reads blocks from disk if need be
                   <-----------------------  Fetched(places, checksums)
      reads, scatters, FetchDone  -------->  may be evicted again

Only whole blocks are kept: a block that has left a window lacks a layer group, so it can't be
stored. The hashes of a chain begin at its start.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvpool.core.layout.hashes import BlockHash
from kvpool.core.node.tier_blocks import PoolPlace
from kvrelay.types import Incarnation


class PoolTier(StrEnum):
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFormat:
    """The format of the blocks. A pool node holds blocks of one format.

    `fingerprint` is the layout's logical fingerprint, `block_bytes` its `bytes_per_block`.
    """

    fingerprint: str
    physical_format: str
    block_bytes: int

    def __str__(self) -> str:
        return f"{self.physical_format} of {self.block_bytes} bytes, model {self.fingerprint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHello:
    """A worker's first message. `looks_up`: it runs on the node's host and looks its prompts up
    here. Routers then count the node's blocks as within its reach."""

    wire_version: int
    incarnation: Incarnation
    format: PoolFormat
    looks_up: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWelcome:
    """`region` holds the host tier, place after place. A granted or fetched place belongs to the
    worker for `lease_ttl_s`. `addresses` are for workers of other hosts."""

    wire_version: int
    incarnation: Incarnation
    region: str
    lease_ttl_s: float
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRefused:
    reason: str


@dataclass(frozen=True, slots=True)
class ChainBlock:
    """`tenant` is a label for reports."""

    hash: BlockHash
    parent: BlockHash | None
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreWanted:
    """Parents come before their children."""

    request_no: int
    blocks: tuple[ChainBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreGranted:
    """Write block `indices[i]` of the request to `places[i]`. The others are there, are coming from
    another worker, or can't be kept."""

    request_no: int
    indices: tuple[int, ...]
    places: tuple[PoolPlace, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """xxh3_64 of each granted place, in the grant's order. No write of the request follows."""

    request_no: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfirmed:
    """The answer to Stored: the blocks of the request are readable now, or they are not."""

    request_no: int
    readable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAbandoned:
    """No write of the request follows, and the written bytes are useless."""

    request_no: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchWanted:
    """Asks for the chain's longest prefix; the worker has its first `skip` blocks."""

    request_no: int
    hashes: tuple[BlockHash, ...]
    skip: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Blocks `skip, skip + 1, ...` of the chain, held until FetchDone; empty: none, and nothing is
    held."""

    request_no: int
    places: tuple[PoolPlace, ...]
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchDone:
    """`damaged` are blocks whose bytes did not match their checksum, or are known to be wrong
    otherwise; in that case they belong to no open fetch."""

    request_no: int
    damaged: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupWanted:
    request_no: int
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedUp:
    """The chain's first `host_blocks` are in memory, the `disk_blocks` after them only on disk."""

    request_no: int
    host_blocks: int
    disk_blocks: int


ToPool = PoolHello | StoreWanted | Stored | StoreAbandoned | FetchWanted | FetchDone | LookupWanted
FromPool = PoolWelcome | PoolRefused | StoreGranted | StoreConfirmed | Fetched | LookedUp
PoolMessage = ToPool | FromPool
