"""What routers are told of blocks, to protobuf and back."""

from __future__ import annotations

import pytest

from kvrelay.errors import PeerError
from kvrelay.messages import BlockChanges, PoolUpdate
from kvrelay.reports_wire import decode_changes, decode_update, encode_changes, encode_update
from kvrelay.types import Incarnation, Tier
from kvrelay.v1 import pool_node_pb2 as pb

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
    assert decode_changes(map(encode_changes, CHANGES)) == CHANGES


@pytest.mark.parametrize(
    "sent", [pb.BlockChanges(tier="tape"), pb.BlockChanges(tier="host", stored=bytes(31))]
)
def test_what_can_not_be_read_is_refused(sent: pb.BlockChanges) -> None:
    with pytest.raises(PeerError):
        decode_changes([sent])
