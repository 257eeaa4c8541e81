"""What routers are told of blocks, to protobuf and back."""

from __future__ import annotations

import pytest

from kvrelay.errors import PeerError
from kvrelay.messages import BlockChanges, Counters, PoolUpdate
from kvrelay.types import Incarnation, Tier
from kvrelay.v1 import pool_node_pb2 as pb
from kvrelay.wire import decode_changes, decode_update, encode_batch, encode_update

X, Y = (bytes([n]) * 32 for n in (1, 2))
CHANGES = (
    BlockChanges(tier=Tier.DISK, stored=(X, Y), removed=(Y,)),
    BlockChanges(tier=Tier.HOST, removed=(X,)),
)


def test_updates_there_and_back() -> None:
    full = PoolUpdate(
        sequence=2**40,
        node=Incarnation("n"),
        addresses=("nixl:h:1/n", "ucx:h:2/n"),
        workers=(Incarnation("v"), Incarnation("w")),
        blocks=CHANGES,
    )
    for update in (full, PoolUpdate(sequence=0, node=Incarnation("n"))):
        sent = encode_update(update).SerializeToString()
        assert decode_update(pb.PoolUpdate.FromString(sent)) == update


def test_changes_there_and_back() -> None:
    assert decode_changes(encode_batch([], Counters(), 0.0, CHANGES).blocks) == CHANGES


@pytest.mark.parametrize(
    "sent", [pb.BlockChanges(tier="tape"), pb.BlockChanges(tier="host", stored=bytes(31))]
)
def test_what_can_not_be_read_is_refused(sent: pb.BlockChanges) -> None:
    with pytest.raises(PeerError):
        decode_changes([sent])
