"""What a worker says after each of its turns to protobuf and back: events, counters, blocks.

Pure: the caller passes its clock. What this module can't read raises PeerError.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from kvrelay.blocks_wire import encode_changes
from kvrelay.from_worker_wire import encode_event
from kvrelay.messages import BlockChanges, Counters, LinkState, TierLoad, WorkerEvent
from kvrelay.types import Incarnation
from kvrelay.v1 import worker_pb2 as pb


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
        blocks=map(encode_changes, blocks),
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
