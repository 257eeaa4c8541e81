"""What routers are told of blocks, to protobuf and back."""

from __future__ import annotations

import pytest

from kvrelay.counters import Counters
from kvrelay.errors import PeerError
from kvrelay.messages import BlockChanges, CutRun, PoolUpdate, StoredRun
from kvrelay.types import Incarnation, Tier
from kvrelay.v1 import pool_node_pb2 as pb
from kvrelay.wire import decode_changes, decode_update, encode_batch, encode_update

CHANGES = (
    BlockChanges(
        tier=Tier.DISK,
        cut=(CutRun(number=2**40, end=3), CutRun(number=1, end=0)),
        stored=(
            StoredRun(number=2**40 + 1, parent=7, start=80, hashes=bytes(range(64))),
            StoredRun(number=7, parent=7, start=2**20, hashes=bytes(32)),
        ),
    ),
    BlockChanges(tier=Tier.HOST, cut=(CutRun(number=1, end=1),)),
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


def test_another_tier_is_refused() -> None:
    with pytest.raises(PeerError, match=r"sent BlockChanges\.tier 'tape', which is none of device"):
        decode_changes([pb.BlockChanges(tier="tape")])


@pytest.mark.parametrize("size", [1, 31, 33])
def test_hashes_of_another_size_are_refused(size: int) -> None:
    stored = pb.StoredRun(number=1, hashes=bytes(size))
    with pytest.raises(PeerError, match=rf"sent StoredRun.hashes of {size} bytes, .* of 32 bytes"):
        decode_changes([pb.BlockChanges(tier="host", stored=[stored])])
