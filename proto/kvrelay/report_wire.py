"""What a worker says after each of its turns to protobuf and back: events, counters, blocks.

Pure: the caller passes its clock. What this module can't read raises PeerError.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict

from kvrelay.errors import PeerError
from kvrelay.from_worker_wire import encode_event
from kvrelay.messages import BlockChanges, Counters, LinkState, TierLoad, WorkerEvent
from kvrelay.types import Incarnation, Tier
from kvrelay.v1 import worker_pb2 as pb

_HASH_BYTES = 32


def encode_batch(
    events: Iterable[WorkerEvent],
    counters: Counters,
    now_s: float,
    blocks: Iterable[BlockChanges] = (),
) -> pb.FromWorker:
    """All that one engine step has to say to one router."""
    return pb.FromWorker(
        events=[encode_event(event, now_s) for event in events],
        counters=pb.Counters(**asdict(counters)),
        blocks=map(_encode_changes, blocks),
    )


def decode_counters(message: pb.Counters) -> Counters:
    names = Counters.__dataclass_fields__
    fields = {name: getattr(message, name) for name in names}
    fields["links"] = tuple(_decode_link(link) for link in message.links)
    fields["tiers"] = tuple(map(_decode_tier, message.tiers))
    return Counters(**fields)


def _decode_tier(message: pb.TierLoad) -> TierLoad:
    return TierLoad(tier=message.tier, running=message.running, waiting=message.waiting)


def _decode_link(message: pb.Link) -> LinkState:
    return LinkState(
        peer=Incarnation(message.peer),
        transport=message.transport,
        bytes_per_s=message.bytes_per_s,
        latency_s=message.latency_s,
    )


def _encode_changes(changes: BlockChanges) -> pb.BlockChanges:
    return pb.BlockChanges(
        holder=changes.holder,
        tier=changes.tier,
        stored=b"".join(changes.stored),
        removed=b"".join(changes.removed),
        gone=changes.gone,
        addresses=changes.addresses,
    )


def decode_changes(message: pb.FromWorker) -> Iterator[BlockChanges]:
    for changes in message.blocks:
        if changes.tier not in tuple(Tier):
            raise PeerError(f"a worker holds blocks in the unknown tier {changes.tier!r}")
        yield BlockChanges(
            holder=Incarnation(changes.holder),
            tier=Tier(changes.tier),
            stored=_hashes(changes.stored),
            removed=_hashes(changes.removed),
            gone=changes.gone,
            addresses=tuple(changes.addresses),
        )


def _hashes(joined: bytes) -> tuple[bytes, ...]:
    if len(joined) % _HASH_BYTES:
        raise PeerError(f"{len(joined)} bytes are no hashes of {_HASH_BYTES} bytes each")
    return tuple(joined[at : at + _HASH_BYTES] for at in range(0, len(joined), _HASH_BYTES))
