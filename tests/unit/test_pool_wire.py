"""Every pool message survives the wire, whatever its length; garbage is refused."""

from __future__ import annotations

import pytest

from kvpool.core.layout.hashes import BlockHash
from kvpool.core.node.messages import (
    ChainBlock,
    FetchDone,
    Fetched,
    FetchWanted,
    LookedUp,
    LookupWanted,
    PoolFormat,
    PoolHello,
    PoolMessage,
    PoolRefused,
    PoolWelcome,
    StoreAbandoned,
    StoreConfirmed,
    Stored,
    StoreGranted,
    StoreWanted,
)
from kvpool.core.node.tier_blocks import PoolPlace
from kvpool.transport.peer.base import MAX_MESSAGE_BYTES
from kvpool.wire.pool import MAX_PART_BYTES, Assembler, encode
from kvrelay.errors import PeerError
from kvrelay.types import Incarnation


def _hashes(count: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(i.to_bytes(32, "big")) for i in range(1, count + 1))


_FORMAT = PoolFormat(fingerprint="5a" * 16, physical_format="bfloat16/block16", block_bytes=2**33)
_A, _B = _hashes(2)
_PLACES = (PoolPlace(3), PoolPlace(2**40))
MESSAGES: list[PoolMessage] = [
    PoolHello(wire_version=1, incarnation=Incarnation("w"), format=_FORMAT, looks_up=True),
    PoolWelcome(wire_version=1, incarnation=Incarnation("n"), region="r", lease_ttl_s=0.5),
    PoolWelcome(
        wire_version=1,
        incarnation=Incarnation("n"),
        region="r",
        lease_ttl_s=0.5,
        addresses=("nixl:h:1/n", "ucx:h:2/n"),
    ),
    PoolRefused(reason="another model"),
    StoreWanted(request_no=1, blocks=(ChainBlock(_A, None), ChainBlock(_B, _A))),
    StoreWanted(request_no=1, blocks=(ChainBlock(_A, None, "ten"), ChainBlock(_B, _A))),
    StoreGranted(request_no=2, indices=(0, 7), places=_PLACES),
    Stored(request_no=3, checksums=(0, 2**64 - 1)),
    StoreConfirmed(request_no=3, readable=True),
    StoreConfirmed(request_no=3, readable=False),
    StoreAbandoned(request_no=4),
    FetchWanted(request_no=5, hashes=(_A, _B), skip=1),
    Fetched(request_no=6, places=_PLACES, checksums=(1, 2)),
    Fetched(request_no=6, places=(), checksums=()),
    FetchDone(request_no=7, damaged=(_B,)),
    LookupWanted(request_no=8, hashes=_hashes(10_000)),
    LookedUp(request_no=9, host_blocks=3, disk_blocks=4),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_there_and_back(message: PoolMessage) -> None:
    assembler = Assembler()
    for _ in range(2):
        *others, last = encode(message)
        assert all(len(part) <= MAX_MESSAGE_BYTES for part in (*others, last))
        assert [assembler.add(part) for part in others] == [None] * len(others)
        assert assembler.add(last) == message


def test_a_part_is_what_a_transport_takes() -> None:
    assert MAX_PART_BYTES == MAX_MESSAGE_BYTES
    assert len(encode(MESSAGES[15])) == 5


@pytest.mark.parametrize("garbage", [b"", b"\2", b"\0\xff", b"\0", b"\0\x22\x03\x12\x01a"])
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(PeerError, match="a peer sent"):
        Assembler().add(garbage)
