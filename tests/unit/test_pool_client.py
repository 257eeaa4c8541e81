"""A worker's pool client, step by step: exact commands."""

from __future__ import annotations

import pytest

from kvpool.core.fetch.client import PoolClient
from kvpool.core.fetch.client_events import (
    BlocksFetched,
    BlocksStored,
    ClientCommand,
    ClientEvent,
    ClientTick,
    DropPrefix,
    FetchBlocks,
    FromNode,
    OfferBlocks,
    OfferConfirmed,
    OfferedBlock,
    OfferSettled,
    PoolJoined,
    PoolLost,
    PrefixFetched,
    PrefixFound,
    SeekPrefix,
    SendPool,
    StoreBlocks,
    WantPrefix,
)
from kvpool.core.layout.layout import BlockId
from kvpool.core.node.messages import (
    ChainBlock,
    FetchDone,
    Fetched,
    FetchWanted,
    FromPool,
    LookedUp,
    LookupWanted,
    PoolWelcome,
    StoreAbandoned,
    StoreConfirmed,
    Stored,
    StoreGranted,
    StoreWanted,
)
from kvpool.core.node.tier_blocks import PoolPlace
from kvrelay.types import Incarnation, RequestKey
from tests.unit.naive_tree import hashes_of

TTL_S, PATIENCE_S = 30.0, 5.0
CHAIN = hashes_of((1, 2, 3, 4, 5))
KEY = RequestKey("r", 0)
PLACES = tuple(PoolPlace(i) for i in (7, 3))
TARGETS = tuple((BlockId(i),) for i in (1, 2))
WANT = WantPrefix(key=KEY, hashes=tuple(CHAIN[:3]), targets=TARGETS, skip=1)


class Worker:
    def __init__(self, **limits: int) -> None:
        self.client = PoolClient(patience_s=PATIENCE_S, **limits)
        self.now_s = 0.0

    def tell(self, event: ClientEvent) -> list[ClientCommand]:
        commands = self.client.handle(event, self.now_s)
        self.client.validate()
        return commands

    def join(self, life: int = 1) -> None:
        welcome = PoolWelcome(
            wire_version=1,
            incarnation=Incarnation(str(life)),
            region=f"region-{life}",
            lease_ttl_s=TTL_S,
        )
        self.tell(PoolJoined(welcome=welcome))

    def hear(self, message: FromPool) -> list[ClientCommand]:
        return self.tell(FromNode(message=message))


def offer(number: int, *indices: int) -> OfferBlocks:
    blocks = tuple(
        OfferedBlock(CHAIN[i], CHAIN[i - 1] if i else None, (BlockId(i),)) for i in indices
    )
    return OfferBlocks(offer=number, blocks=blocks)


def wanted(request_no: int, *indices: int) -> SendPool:
    blocks = tuple(ChainBlock(CHAIN[i], CHAIN[i - 1] if i else None) for i in indices)
    return SendPool(message=StoreWanted(request_no=request_no, blocks=blocks))


def over(offer: int) -> list[ClientCommand]:
    """It is neither read nor waited for."""
    return [OfferSettled(offer=offer), OfferConfirmed(offer=offer)]


def done(**changes: object) -> BlocksFetched:
    fields = {"request_no": 1, "region": "region-1", "sound_blocks": 2}
    return BlocksFetched(**fields | changes)  # type: ignore[arg-type]


def test_offers_are_gathered_into_batches_and_settled_when_read() -> None:
    worker = Worker(batch_blocks=3, max_stores=1)
    worker.join()
    assert worker.tell(offer(1, 0)) == [wanted(1, 0)]
    assert worker.tell(offer(2, 1, 2)) == worker.tell(offer(3, 3, 4)) == []
    nothing = StoreGranted(request_no=1, indices=(), places=())
    assert worker.hear(nothing) == [*over(1), wanted(2, 1, 2, 3)]
    granted = StoreGranted(request_no=2, indices=(1, 2), places=PLACES)
    sources = ((BlockId(2),), (BlockId(3),))
    assert worker.hear(granted) == [
        StoreBlocks(request_no=2, region="region-1", sources=sources, places=PLACES)
    ]
    stored = BlocksStored(request_no=2, region="region-1", checksums=(8, 9))
    assert worker.tell(stored) == [
        OfferSettled(offer=2),
        SendPool(message=Stored(request_no=2, checksums=(8, 9))),
        wanted(3, 4),
    ]
    assert worker.hear(StoreConfirmed(request_no=2, readable=True)) == [OfferConfirmed(offer=2)]
    assert worker.client.stores.stored_blocks == 2
    assert worker.hear(StoreGranted(request_no=3, indices=(), places=())) == over(3)
    assert worker.client.idle


@pytest.mark.parametrize("how", ["not readable", "lost", "too late"])
def test_no_one_waits_longer_than_the_node_answers(how: str) -> None:
    worker = Worker()
    worker.join()
    worker.tell(offer(1, 0))
    worker.hear(StoreGranted(request_no=1, indices=(0,), places=PLACES[:1]))
    worker.now_s = 100.0
    stored = BlocksStored(request_no=1, region="region-1", checksums=(8,))
    told = SendPool(message=Stored(request_no=1, checksums=(8,)))
    assert worker.tell(stored) == [OfferSettled(offer=1), told]
    assert worker.tell(ClientTick()) == [], "patience begins with the question"
    confirmed = [OfferConfirmed(offer=1)]
    match how:
        case "not readable":
            assert worker.hear(StoreConfirmed(request_no=1, readable=False)) == confirmed
        case "lost":
            assert worker.tell(PoolLost(reason="")) == confirmed
        case "too late":
            worker.now_s += PATIENCE_S
            assert worker.tell(ClientTick()) == confirmed
            assert worker.hear(StoreConfirmed(request_no=1, readable=True)) == []
    assert worker.client.stores.stored_blocks == 0


def test_what_finds_no_room_is_dropped_at_once() -> None:
    worker = Worker(max_waiting_blocks=2, max_stores=0)
    assert worker.tell(offer(1, 0)) == over(1), "no node"
    worker.join()
    assert worker.tell(offer(2, 0, 1, 2)) == []
    assert worker.tell(offer(3, 3)) == over(3)
    assert worker.client.stores.dropped_blocks == 3


def test_a_gather_outlives_the_node_and_is_not_told_to_the_next() -> None:
    worker = Worker()
    worker.join()
    worker.tell(offer(1, 0))
    worker.hear(StoreGranted(request_no=1, indices=(0,), places=PLACES[:1]))
    assert worker.tell(PoolLost(reason="")) == [], "its block is being read"
    worker.join(2)
    stored = BlocksStored(request_no=1, region="region-1", checksums=(8,))
    assert worker.tell(stored) == over(1)


def test_a_gather_that_failed_is_abandoned() -> None:
    worker = Worker()
    worker.join()
    worker.tell(offer(1, 0))
    worker.hear(StoreGranted(request_no=1, indices=(0,), places=PLACES[:1]))
    failed = BlocksStored(request_no=1, region="region-1", error="no")
    abandoned = SendPool(message=StoreAbandoned(request_no=1))
    assert worker.tell(failed) == [*over(1), abandoned]


def test_fetched() -> None:
    worker = Worker()
    worker.join()
    message = FetchWanted(request_no=1, hashes=tuple(CHAIN[:3]), skip=1)
    assert worker.tell(WANT) == [SendPool(message=message)]
    assert worker.hear(Fetched(request_no=1, places=PLACES, checksums=(8, 9))) == [
        FetchBlocks(
            request_no=1, region="region-1", places=PLACES, checksums=(8, 9), targets=TARGETS
        )
    ]
    assert worker.tell(done()) == [
        SendPool(message=FetchDone(request_no=1)),
        PrefixFetched(key=KEY, blocks=2),
    ]


def test_a_damaged_block_is_named_and_ends_the_prefix() -> None:
    worker = Worker()
    worker.join()
    worker.tell(WANT)
    worker.hear(Fetched(request_no=1, places=PLACES, checksums=(8, 9)))
    assert worker.tell(done(sound_blocks=1, damaged=True)) == [
        SendPool(message=FetchDone(request_no=1, damaged=(CHAIN[2],))),
        PrefixFetched(key=KEY, blocks=1),
    ]


def test_what_was_read_too_late_says_nothing_of_the_block() -> None:
    """The place may have been another's."""
    worker = Worker()
    worker.join()
    worker.tell(WANT)
    worker.hear(Fetched(request_no=1, places=PLACES, checksums=(8, 9)))
    worker.now_s = TTL_S
    assert worker.tell(done(sound_blocks=1, damaged=True)) == [
        SendPool(message=FetchDone(request_no=1)),
        PrefixFetched(key=KEY, blocks=0),
    ]


@pytest.mark.parametrize("how", ["lost", "lost and back", "dropped", "too late"])
def test_what_was_read_is_void_when_it_was_not_held_to_the_end(how: str) -> None:
    worker = Worker()
    worker.join()
    worker.tell(WANT)
    worker.hear(Fetched(request_no=1, places=PLACES, checksums=(8, 9)))
    match how:
        case "lost" | "lost and back":
            assert worker.tell(PoolLost(reason="")) == [], "the targets are being written"
        case "dropped":
            assert worker.tell(DropPrefix(key=KEY)) == []
        case "too late":
            worker.now_s = TTL_S
    if how == "lost and back":
        worker.join()
    assert worker.tell(done())[-1] == PrefixFetched(key=KEY, blocks=0)
    assert worker.client.idle


def test_no_one_waits_for_a_node_that_hangs() -> None:
    worker = Worker()
    worker.join()
    worker.tell(WANT)
    worker.tell(offer(1, 0))
    worker.tell(SeekPrefix(key=KEY, hashes=tuple(CHAIN)))
    worker.now_s = PATIENCE_S
    assert worker.tell(ClientTick()) == [
        *over(1),
        PrefixFetched(key=KEY, blocks=0),
        PrefixFound(key=KEY, host_blocks=0, disk_blocks=0),
    ]
    assert worker.client.idle
    late = Fetched(request_no=1, places=PLACES, checksums=(8, 9))
    assert worker.hear(late) == [SendPool(message=FetchDone(request_no=1))]
    granted = StoreGranted(request_no=2, indices=(0,), places=PLACES[:1])
    assert worker.hear(granted) == [SendPool(message=StoreAbandoned(request_no=2))]
    assert worker.hear(LookedUp(request_no=3, host_blocks=1, disk_blocks=0)) == []
    assert worker.hear(late) == worker.hear(granted) == [], "once"


def test_without_a_node_every_question_is_answered_at_once() -> None:
    worker = Worker()
    assert worker.tell(WANT) == [PrefixFetched(key=KEY, blocks=0)]
    assert worker.tell(SeekPrefix(key=KEY, hashes=())) == [
        PrefixFound(key=KEY, host_blocks=0, disk_blocks=0)
    ]


def test_how_much_is_there() -> None:
    worker = Worker()
    worker.join()
    lookup = LookupWanted(request_no=1, hashes=tuple(CHAIN))
    assert worker.tell(SeekPrefix(key=KEY, hashes=tuple(CHAIN))) == [SendPool(message=lookup)]
    assert worker.hear(LookedUp(request_no=1, host_blocks=2, disk_blocks=1)) == [
        PrefixFound(key=KEY, host_blocks=2, disk_blocks=1)
    ]
