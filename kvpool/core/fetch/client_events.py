"""Events and commands of a worker that is a client of pool nodes, as values. Pure.

What comes from a node, or is to be done with it, names the node.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.core.blocks.device_blocks import Place
from kvpool.core.layout.hashes import BlockHash
from kvpool.core.node.messages import FromPool, PoolWelcome, ToPool
from kvpool.core.node.tier_blocks import PoolPlace
from kvrelay.types import Incarnation

OWN_NODE = Incarnation("")
"""The node of this host, in whichever life."""

# --- from the link ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolJoined:
    """The node accepts this worker."""

    welcome: PoolWelcome
    node: Incarnation = OWN_NODE


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLost:
    """A link of another host's node ends with one of these, even if it never joined."""

    reason: str
    node: Incarnation = OWN_NODE


@dataclass(frozen=True, slots=True, kw_only=True)
class FromNode:
    message: FromPool
    node: Incarnation = OWN_NODE


# --- to be stored -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OfferedBlock:
    """A full block; `place` has a block in every layer group. `tenant` is a label."""

    hash: BlockHash
    parent: BlockHash | None
    place: Place
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferBlocks:
    """Newly cached blocks, parents before their children. They stay unchanged until OfferSettled;
    OfferConfirmed follows. The caller chooses the number `offer`."""

    offer: int
    blocks: tuple[OfferedBlock, ...]


# --- from the mover -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """The places are written (`error` None), or not all of them, and no more writes follow."""

    request_no: int
    region: str
    checksums: tuple[int, ...] = ()
    bytes: int = 0
    seconds: float = 0.0
    error: str | None = None
    node: Incarnation = OWN_NODE


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksFetched:
    """The first `sound_blocks` targets match their checksums. `damaged`: the place after them did
    not. `error`: another reason for the early end."""

    request_no: int
    region: str
    sound_blocks: int
    damaged: bool = False
    bytes: int = 0
    seconds: float = 0.0
    error: str | None = None
    node: Incarnation = OWN_NODE


NodeEvent = PoolJoined | PoolLost | FromNode | BlocksStored | BlocksFetched
"""What a worker hears of its nodes."""

# --- commands -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectNode:
    """Link to this node of another host, at one of these addresses; ends in PoolLost."""

    node: Incarnation
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseNode:
    node: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPool:
    """Dropped if the node is not there."""

    message: ToPool
    node: Incarnation = OWN_NODE


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBlocks:
    """Gather `sources[i]` into `places[i]` of the node's `region`; ends in BlocksStored."""

    request_no: int
    region: str
    sources: tuple[Place, ...]
    places: tuple[PoolPlace, ...]
    node: Incarnation = OWN_NODE


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchBlocks:
    """Scatter `places[i]` of the node's `region` into `targets[i]`; ends in BlocksFetched."""

    request_no: int
    region: str
    places: tuple[PoolPlace, ...]
    checksums: tuple[int, ...]
    targets: tuple[Place, ...]
    node: Incarnation = OWN_NODE


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferSettled:
    """The blocks of the offer are no longer read."""

    offer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferConfirmed:
    """After OfferSettled: what the node has taken of the offer can be found there now."""

    offer: int


PoolAnswer = OfferSettled | OfferConfirmed
NodeOrder = ConnectNode | CloseNode | SendPool | StoreBlocks | FetchBlocks
"""What a worker does with its nodes."""
ClientCommand = NodeOrder | PoolAnswer
