"""Which blocks a worker or a pool node holds, as they tell routers, to protobuf and back. Pure.

What this module can't read raises PeerError.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.errors import PeerError
from kvrelay.messages import BlockChanges, PoolUpdate
from kvrelay.types import Incarnation, Tier
from kvrelay.v1 import pool_node_pb2 as node_pb

_HASH_BYTES = 32


def encode_changes(changes: BlockChanges) -> node_pb.BlockChanges:
    return node_pb.BlockChanges(
        tier=changes.tier,
        stored=b"".join(changes.stored),
        removed=b"".join(changes.removed),
    )


def decode_changes(messages: Iterable[node_pb.BlockChanges]) -> tuple[BlockChanges, ...]:
    return tuple(map(_decode, messages))


def encode_update(update: PoolUpdate) -> node_pb.PoolUpdate:
    return node_pb.PoolUpdate(
        sequence=update.sequence,
        incarnation=update.node,
        addresses=update.addresses,
        workers=update.workers,
        blocks=map(encode_changes, update.blocks),
    )


def decode_update(message: node_pb.PoolUpdate) -> PoolUpdate:
    return PoolUpdate(
        sequence=message.sequence,
        node=Incarnation(message.incarnation),
        addresses=tuple(message.addresses),
        workers=tuple(map(Incarnation, message.workers)),
        blocks=decode_changes(message.blocks),
    )


def _decode(message: node_pb.BlockChanges) -> BlockChanges:
    if message.tier not in tuple(Tier):
        raise PeerError(f"blocks in the unknown tier {message.tier!r}")
    return BlockChanges(
        tier=Tier(message.tier), stored=_hashes(message.stored), removed=_hashes(message.removed)
    )


def _hashes(joined: bytes) -> tuple[bytes, ...]:
    if len(joined) % _HASH_BYTES:
        raise PeerError(f"{len(joined)} bytes are no hashes of {_HASH_BYTES} bytes each")
    return tuple(joined[at : at + _HASH_BYTES] for at in range(0, len(joined), _HASH_BYTES))
