"""What a worker stores in its host's pool node, step by step: exact commands."""

from __future__ import annotations

import pytest

from kvpool.core.fetch.client_events import (
    BlocksStored,
    ClientCommand,
    OfferBlocks,
    OfferConfirmed,
    OfferedBlock,
    OfferSettled,
    SendPool,
    StoreBlocks,
)
from kvpool.core.fetch.pool_stores import PoolStores
from kvpool.core.layout.layout import BlockId
from kvpool.core.node.messages import (
    ChainBlock,
    StoreAbandoned,
    StoreConfirmed,
    Stored,
    StoreGranted,
    StoreWanted,
)
from kvpool.core.node.tier_blocks import PoolPlace
from tests.unit.naive_tree import hashes_of

PATIENCE_S = 5.0
CHAIN = hashes_of((1, 2, 3, 4, 5))
PLACES = tuple(PoolPlace(i) for i in (7, 3))


class Worker:
    def __init__(self, **limits: int) -> None:
        self.stores = PoolStores(patience_s=PATIENCE_S, **limits)
        self.now_s = 0.0

    def join(self, life: int = 1) -> None:
        self.stores.region = f"region-{life}"

    def offer(self, number: int, *indices: int) -> list[ClientCommand]:
        blocks = tuple(
            OfferedBlock(CHAIN[i], CHAIN[i - 1] if i else None, (BlockId(i),)) for i in indices
        )
        self.stores.offer(OfferBlocks(offer=number, blocks=blocks), self.now_s)
        return self._commands()

    def granted(self, number: int, *indices: int) -> list[ClientCommand]:
        places = PLACES[: len(indices)]
        granted = StoreGranted(request_no=number, indices=indices, places=places)
        self.stores.granted(granted, self.now_s)
        return self._commands()

    def gathered(self, number: int, *checksums: int) -> list[ClientCommand]:
        """Without checksums it failed."""
        error = None if checksums else "no"
        done = BlocksStored(request_no=number, region="region-1", checksums=checksums, error=error)
        self.stores.gathered(done, self.now_s)
        return self._commands()

    def confirmed(self, number: int, *, readable: bool = True) -> list[ClientCommand]:
        self.stores.confirmed(StoreConfirmed(request_no=number, readable=readable))
        return self._commands()

    def lost(self) -> list[ClientCommand]:
        self.stores.lost()
        return self._commands()

    def tick(self) -> list[ClientCommand]:
        if self.stores.is_late(self.now_s):
            self.stores.fall_mute()
        return self._commands()

    def _commands(self) -> list[ClientCommand]:
        self.stores.validate()
        commands = self.stores.outbox.copy()
        self.stores.outbox.clear()
        return commands


def wanted(request_no: int, *indices: int) -> SendPool:
    blocks = tuple(ChainBlock(CHAIN[i], CHAIN[i - 1] if i else None) for i in indices)
    return SendPool(message=StoreWanted(request_no=request_no, blocks=blocks))


def over(offer: int) -> list[ClientCommand]:
    """It is neither read nor waited for."""
    return [OfferSettled(offer=offer), OfferConfirmed(offer=offer)]


def test_offers_are_gathered_into_batches_and_settled_when_read() -> None:
    worker = Worker(batch_blocks=3, max_stores=1)
    worker.join()
    assert worker.offer(1, 0) == [wanted(1, 0)]
    assert worker.offer(2, 1, 2) == worker.offer(3, 3, 4) == []
    assert worker.granted(1) == [*over(1), wanted(2, 1, 2, 3)]
    sources = ((BlockId(2),), (BlockId(3),))
    assert worker.granted(2, 1, 2) == [
        StoreBlocks(request_no=2, region="region-1", sources=sources, places=PLACES)
    ]
    assert worker.gathered(2, 8, 9) == [
        OfferSettled(offer=2),
        SendPool(message=Stored(request_no=2, checksums=(8, 9))),
        wanted(3, 4),
    ]
    assert worker.confirmed(2) == [OfferConfirmed(offer=2)]
    assert worker.stores.stored_blocks == 2
    assert worker.granted(3) == over(3)
    assert worker.stores.idle


@pytest.mark.parametrize("how", ["not readable", "lost", "too late"])
def test_no_one_waits_longer_than_the_node_answers(how: str) -> None:
    worker = Worker()
    worker.join()
    worker.offer(1, 0)
    worker.granted(1, 0)
    worker.now_s = 100.0
    told = SendPool(message=Stored(request_no=1, checksums=(8,)))
    assert worker.gathered(1, 8) == [OfferSettled(offer=1), told]
    assert worker.tick() == [], "patience begins with the question"
    confirmed = [OfferConfirmed(offer=1)]
    match how:
        case "not readable":
            assert worker.confirmed(1, readable=False) == confirmed
        case "lost":
            assert worker.lost() == confirmed
        case "too late":
            worker.now_s += PATIENCE_S
            assert worker.tick() == confirmed
            assert worker.confirmed(1) == []
    assert worker.stores.stored_blocks == 0


def test_nothing_is_offered_to_a_node_that_does_not_answer() -> None:
    worker = Worker(max_stores=1, batch_blocks=1)
    worker.join()
    worker.offer(1, 0)
    worker.offer(2, 1)
    worker.now_s = PATIENCE_S
    assert worker.tick() == [*over(2), *over(1)], "the one that waits, and the one that was asked"
    assert worker.offer(3, 2) == over(3)
    assert worker.granted(1, 0) == [SendPool(message=StoreAbandoned(request_no=1))]
    assert worker.granted(1, 0) == [], "once"
    worker.stores.speaks()
    assert worker.offer(4, 2) == [wanted(2, 2)]


def test_nobody_waits_for_what_was_gathered_when_the_node_fell_mute() -> None:
    worker = Worker()
    worker.join()
    worker.offer(1, 0)
    worker.granted(1, 0)
    worker.stores.fall_mute()
    told = SendPool(message=Stored(request_no=1, checksums=(8,)))
    assert worker.gathered(1, 8) == [OfferSettled(offer=1), told, OfferConfirmed(offer=1)]
    assert worker.confirmed(1) == []


def test_what_finds_no_room_is_dropped_at_once() -> None:
    worker = Worker(max_waiting_blocks=2, max_stores=0)
    assert worker.offer(1, 0) == over(1), "no node"
    worker.join()
    assert worker.offer(2, 0, 1, 2) == []
    assert worker.offer(3, 3) == over(3)
    assert worker.stores.dropped_blocks == 3


def test_a_gather_outlives_the_node_and_is_not_told_to_the_next() -> None:
    worker = Worker()
    worker.join()
    worker.offer(1, 0)
    worker.granted(1, 0)
    assert worker.lost() == [], "its block is being read"
    worker.join(2)
    assert worker.gathered(1, 8) == over(1)


def test_a_gather_that_failed_is_abandoned() -> None:
    worker = Worker()
    worker.join()
    worker.offer(1, 0)
    worker.granted(1, 0)
    assert worker.gathered(1) == [*over(1), SendPool(message=StoreAbandoned(request_no=1))]
