"""The pool node's core, step by step: exact commands."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvpool.core.blocks.eviction import open_policy
from kvpool.core.layout.hashes import BlockHash
from kvpool.core.node.events import (
    BlockLoad,
    DropWorker,
    FromPoolWorker,
    PoolCommand,
    PoolTick,
    PoolWorkerJoined,
    PoolWorkerLost,
    ReadSlots,
    RouterCall,
    RouterCalled,
    RouterTook,
    SlotOutcome,
    SlotsRead,
    SlotsWritten,
    Spill,
    TellRouter,
    TellWorker,
    WriteSlots,
)
from kvpool.core.node.host_tier import HostTier
from kvpool.core.node.messages import (
    ChainBlock,
    FetchDone,
    Fetched,
    FetchWanted,
    LookedUp,
    LookupWanted,
    StoreConfirmed,
    Stored,
    StoreGranted,
    StoreWanted,
    ToPool,
)
from kvpool.core.node.tier_blocks import PoolPlace, TierBlocks
from kvrelay.messages import BlockChanges, CutRun, StoredRun
from kvrelay.types import Incarnation, Tier
from tests.unit.naive_tree import hashes_of

TTL_S = 30.0
A, B, C, D = hashes_of((1, 2, 3, 4))
OTHER = hashes_of((9,))[0]
CHAIN = tuple(ChainBlock(h, p) for h, p in ((A, None), (B, A), (C, B), (D, C)))
LONE = ChainBlock(OTHER, None)
ANN, BOB = Incarnation("ann"), Incarnation("bob")
P0, P1, P2, P3 = (PoolPlace(i) for i in range(4))


class Node:
    """Two workers that don't look up; no router has called."""

    def __init__(self, *, places: int = 4, slots: int = 0) -> None:
        tiers = [TierBlocks(count, open_policy("lru")) for count in (places, slots)]
        self.core = HostTier(*tiers, lease_ttl_s=TTL_S)
        self.now_s = 0.0
        for worker in (ANN, BOB):
            assert self.handle(PoolWorkerJoined(worker=worker, looks_up=False)) == []

    def handle(self, event: object) -> list[PoolCommand]:
        commands = self.core.handle(event, self.now_s)  # type: ignore[arg-type]
        self.core.validate()
        return commands

    def say(self, message: ToPool, worker: Incarnation = ANN) -> list[object]:
        """What the same worker is answered."""
        return [
            command.message if isinstance(command, TellWorker) else command
            for command in self.handle(FromPoolWorker(worker=worker, message=message))
        ]

    def store(self, *blocks: ChainBlock, number: int = 1) -> list[object]:
        """What follows when the writer is done; checksum i is 100 + i."""
        (granted,) = self.say(StoreWanted(request_no=number, blocks=blocks))
        assert isinstance(granted, StoreGranted)
        assert granted.indices == tuple(range(len(blocks)))
        checksums = tuple(100 + i for i in granted.indices)
        confirmed, *rest = self.say(Stored(request_no=number, checksums=checksums))
        assert confirmed == StoreConfirmed(request_no=number, readable=True)
        return rest


def test_stored_then_fetched() -> None:
    node = Node()
    wanted = StoreWanted(request_no=1, blocks=CHAIN[:2])
    granted = StoreGranted(request_no=1, indices=(0, 1), places=(P0, P1))
    assert node.say(wanted) == [granted]
    nothing = Fetched(request_no=2, places=(), checksums=())
    assert node.say(FetchWanted(request_no=2, hashes=(A, B)), BOB) == [nothing], "not yet readable"
    confirmed = StoreConfirmed(request_no=1, readable=True)
    assert node.say(Stored(request_no=1, checksums=(7, 8))) == [confirmed]
    fetched = Fetched(request_no=3, places=(P1,), checksums=(8,))
    assert node.say(FetchWanted(request_no=3, hashes=(A, B, C), skip=1), BOB) == [fetched]
    assert not node.core.idle
    assert node.say(FetchDone(request_no=3), BOB) == []
    assert node.core.idle


def test_a_block_that_is_here_or_coming_is_not_written_twice() -> None:
    node = Node()
    node.store(CHAIN[0])
    assert node.say(StoreWanted(request_no=2, blocks=CHAIN[:2])) == [
        StoreGranted(request_no=2, indices=(1,), places=(P1,))
    ]
    assert node.say(StoreWanted(request_no=2, blocks=CHAIN[:3]), BOB) == [
        StoreGranted(request_no=2, indices=(2,), places=(P2,))
    ]
    orphan = ChainBlock(D, hashes_of((8, 8))[1])
    nothing = StoreGranted(request_no=3, indices=(), places=())
    assert node.say(StoreWanted(request_no=3, blocks=(orphan,))) == [nothing]


def test_a_block_whose_parent_never_came_is_dropped() -> None:
    node = Node()
    node.say(StoreWanted(request_no=1, blocks=CHAIN[:1]))
    node.say(StoreWanted(request_no=2, blocks=CHAIN[1:2]), BOB)
    node.handle(PoolWorkerLost(worker=ANN))
    dropped = StoreConfirmed(request_no=2, readable=False)
    assert node.say(Stored(request_no=2, checksums=(1,)), BOB) == [dropped]
    assert node.core.books.counts()["free"] == 4


@pytest.mark.parametrize("late", [True, False])
def test_a_silent_writers_places_stay_out_of_use_while_it_may_write(late: bool) -> None:
    node = Node(places=2)
    node.say(StoreWanted(request_no=1, blocks=CHAIN[:2]))
    node.now_s = TTL_S
    node.handle(PoolTick())
    assert node.core.books.counts()["fenced"] == 2
    nothing = StoreGranted(request_no=2, indices=(), places=())
    assert node.say(StoreWanted(request_no=2, blocks=CHAIN[:2]), BOB) == [nothing]
    if late:
        confirmed = StoreConfirmed(request_no=1, readable=False)
        assert node.say(Stored(request_no=1, checksums=(1, 2))) == [confirmed]
    else:
        node.handle(PoolWorkerLost(worker=ANN))
    assert node.core.books.counts()["free"] == 2
    lookup = LookupWanted(request_no=3, hashes=(A, B))
    assert node.say(lookup, BOB) == [LookedUp(request_no=3, host_blocks=0, disk_blocks=0)]


def test_what_is_read_is_not_evicted_until_the_lease_ends() -> None:
    node = Node(places=2)
    node.store(*CHAIN[:2])
    node.say(FetchWanted(request_no=5, hashes=(A, B)), BOB)
    nothing = StoreGranted(request_no=2, indices=(), places=())
    assert node.say(StoreWanted(request_no=2, blocks=(LONE,))) == [nothing]
    node.now_s = TTL_S
    node.handle(PoolTick())
    granted = StoreGranted(request_no=3, indices=(0,), places=(P1,))
    assert node.say(StoreWanted(request_no=3, blocks=(LONE,))) == [granted], "the leaf goes first"


def test_room_is_not_made_of_what_the_new_block_continues() -> None:
    node = Node(places=2)
    node.store(CHAIN[0])
    node.store(LONE, number=2)
    node.store(CHAIN[1], number=3)
    lookup = LookupWanted(request_no=4, hashes=(A, B))
    assert node.say(lookup) == [LookedUp(request_no=4, host_blocks=2, disk_blocks=0)]


def test_a_lost_readers_holds_end_at_once() -> None:
    node = Node(places=2)
    node.store(*CHAIN[:2])
    node.say(FetchWanted(request_no=5, hashes=(A, B)), BOB)
    node.handle(PoolWorkerLost(worker=BOB))
    node.store(LONE, number=2)
    assert node.core.books.counts()["cached"] == 2


def test_a_damaged_block_is_served_no_more_until_it_is_stored_anew() -> None:
    node = Node()
    node.store(*CHAIN[:3])
    node.say(FetchWanted(request_no=5, hashes=(A, B, C)), BOB)
    node.say(FetchDone(request_no=5, damaged=(B,)), BOB)
    lookup = LookupWanted(request_no=6, hashes=(A, B, C))
    assert node.say(lookup) == [LookedUp(request_no=6, host_blocks=1, disk_blocks=0)]
    granted = StoreGranted(request_no=7, indices=(1,), places=(P3,))
    assert node.say(StoreWanted(request_no=7, blocks=CHAIN[:3])) == [granted]
    node.say(Stored(request_no=7, checksums=(5,)))
    assert node.say(FetchWanted(request_no=8, hashes=(A, B, C))) == [
        Fetched(request_no=8, places=(P0, P3, P2), checksums=(100, 5, 102))
    ]
    assert node.core.books.counts()["free"] == 1, "the damaged place"


def test_blocks_that_proved_wrong_later_are_served_no_more() -> None:
    """Of no fetch that is open; nor are what is on disk of them."""
    node = Node(places=2, slots=4)
    node.store(*CHAIN[:2])
    node.handle(SlotsWritten(batch=1, outcomes=(SlotOutcome.WRITTEN,) * 2))
    node.say(FetchDone(request_no=9, damaged=(A, B)), BOB)
    lookup = LookupWanted(request_no=6, hashes=(A, B))
    assert node.say(lookup) == [LookedUp(request_no=6, host_blocks=0, disk_blocks=0)]


def test_blocks_go_to_disk_and_come_back() -> None:
    node = Node(places=2, slots=4)
    spills = (
        Spill(hash=A, parent=None, place=P0, checksum=100, slot=P0),
        Spill(hash=B, parent=A, place=P1, checksum=101, slot=P1),
    )
    assert node.store(*CHAIN[:2]) == [WriteSlots(batch=1, spills=spills)]
    node.handle(SlotsWritten(batch=1, outcomes=(SlotOutcome.WRITTEN,) * 2))
    lone = Spill(hash=OTHER, parent=None, place=P1, checksum=100, slot=P2)
    assert node.store(LONE, number=2) == [WriteSlots(batch=2, spills=(lone,))]
    node.handle(SlotsWritten(batch=2, outcomes=(SlotOutcome.FAILED,)))
    lookup = LookupWanted(request_no=3, hashes=(A, B))
    assert node.say(lookup) == [LookedUp(request_no=3, host_blocks=1, disk_blocks=1)]
    loads = (BlockLoad(hash=B, slot=P1, place=P1),)
    reading = ReadSlots(batch=3, parent=A, loads=loads)
    assert node.say(FetchWanted(request_no=4, hashes=(A, B))) == [reading]
    assert node.say(FetchWanted(request_no=4, hashes=(A, B)), BOB) == [], "read once for both"
    fetched = Fetched(request_no=4, places=(P0, P1), checksums=(100, 101))
    assert node.handle(SlotsRead(batch=3, checksums=(101,))) == [
        TellWorker(worker=ANN, message=fetched),
        TellWorker(worker=BOB, message=fetched),
    ]


def test_what_continues_a_block_that_could_not_be_written_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvpool.core.node.disk_tier._BATCH_BLOCKS", 1)
    node = Node(slots=4)
    spill = Spill(hash=A, parent=None, place=P0, checksum=100, slot=P0)
    assert node.store(*CHAIN[:3]) == [WriteSlots(batch=1, spills=(spill,))]
    assert node.core.books.counts()["disk_waiting"] == 3
    assert node.handle(SlotsWritten(batch=1, outcomes=(SlotOutcome.FAILED,))) == []
    assert node.core.books.counts()["disk_waiting"] == 0
    retry = node.store(CHAIN[3], number=2)
    assert retry == [WriteSlots(batch=2, spills=(spill,))], "the next block tries the chain again"


def test_a_damaged_slot_ends_the_prefix_and_is_written_anew() -> None:
    node = Node(places=2, slots=4)
    node.store(*CHAIN[:2])
    node.handle(SlotsWritten(batch=1, outcomes=(SlotOutcome.WRITTEN,) * 2))
    node.store(LONE, number=2)
    node.handle(SlotsWritten(batch=2, outcomes=(SlotOutcome.WRITTEN,)))
    node.say(FetchWanted(request_no=4, hashes=(A, B)))
    short = Fetched(request_no=4, places=(P0,), checksums=(100,))
    assert node.handle(SlotsRead(batch=3, checksums=(None,))) == [
        TellWorker(worker=ANN, message=short)
    ]
    again = Spill(hash=B, parent=A, place=P1, checksum=100, slot=P3)
    assert node.store(CHAIN[1], number=5) == [WriteSlots(batch=4, spills=(again,))]


def test_a_damaged_block_is_not_written_while_another_reads_it() -> None:
    node = Node()
    node.store(*CHAIN[:2])
    node.say(FetchWanted(request_no=5, hashes=(A, B)))
    node.say(FetchWanted(request_no=5, hashes=(A, B)), BOB)
    node.say(FetchDone(request_no=5, damaged=(B,)))
    nothing = StoreGranted(request_no=6, indices=(), places=())
    assert node.say(StoreWanted(request_no=6, blocks=CHAIN[:2])) == [nothing]
    node.say(FetchDone(request_no=5), BOB)
    granted = StoreGranted(request_no=6, indices=(1,), places=(P2,))
    assert node.say(StoreWanted(request_no=6, blocks=CHAIN[:2])) == [granted]


def _written(node: Node, outcome: SlotOutcome, batch: int, blocks: int) -> list[PoolCommand]:
    return node.handle(SlotsWritten(batch=batch, outcomes=(outcome,) * blocks))


def _spilled(commands: Sequence[object]) -> list[BlockHash]:
    (command,) = commands
    assert isinstance(command, WriteSlots)
    return [spill.hash for spill in command.spills]


def test_a_block_that_is_spoiled_on_disk_is_written_anew_with_what_continues_it() -> None:
    """Also when it could not be written the last time."""
    node = Node(slots=8)
    node.store(*CHAIN[:2])
    _written(node, SlotOutcome.WRITTEN, 1, 2)
    node.say(FetchDone(request_no=9, damaged=(B,)))
    assert _spilled(node.store(CHAIN[1], number=2)) == [B]
    _written(node, SlotOutcome.FAILED, 2, 1)
    assert _spilled(node.store(CHAIN[2], number=3)) == [B, C]
    _written(node, SlotOutcome.WRITTEN, 3, 2)
    assert _spilled(node.store(CHAIN[3], number=4)) == [D]


def test_only_blocks_that_are_spoiled_on_disk_are_written_when_a_chain_is_stored_again() -> None:
    node = Node(places=3, slots=8)
    node.store(*CHAIN[:3])
    _written(node, SlotOutcome.WRITTEN, 1, 3)
    node.say(FetchDone(request_no=9, damaged=(B,)))
    others = hashes_of((9, 9, 9))
    pairs = zip(others, [None, *others], strict=False)
    node.store(*(ChainBlock(name, parent) for name, parent in pairs), number=2)
    _written(node, SlotOutcome.WRITTEN, 2, 3)
    assert _spilled(node.store(*CHAIN[:3], number=3)) == [B]


def told(router: RouterCall, sequence: int, *blocks: BlockChanges) -> TellRouter:
    return TellRouter(router=router, sequence=sequence, workers=(), blocks=blocks)


def test_routers_hear_what_there_is_and_every_change() -> None:
    node = Node(places=2)
    node.store(CHAIN[0])
    router = RouterCall(7)
    held = BlockChanges(tier=Tier.HOST, stored=(StoredRun(number=1, parent=0, start=0, hashes=A),))
    assert node.handle(RouterCalled(router=router)) == [told(router, 0, held)]
    assert node.handle(RouterTook(router=router)) == []
    new = BlockChanges(tier=Tier.HOST, stored=(StoredRun(number=1, parent=1, start=1, hashes=B),))
    assert node.store(CHAIN[1], number=2) == [told(router, 1, new)]
    granted = StoreGranted(request_no=3, indices=(0,), places=(P1,))
    assert node.say(StoreWanted(request_no=3, blocks=(LONE,))) == [granted]
    gone = BlockChanges(tier=Tier.HOST, cut=(CutRun(number=1, end=1),))
    assert node.handle(RouterTook(router=router)) == [told(router, 2, gone)]


def test_routers_hear_which_workers_look_up_here() -> None:
    node, router, eve = Node(), RouterCall(7), Incarnation("eve")
    assert node.handle(RouterCalled(router=router)) == [told(router, 0)]
    assert node.handle(PoolWorkerJoined(worker=eve, looks_up=True)) == []
    with_eve = TellRouter(router=router, sequence=1, workers=(eve,), blocks=())
    assert node.handle(RouterTook(router=router)) == [with_eve]
    node.handle(PoolWorkerLost(worker=eve))
    assert node.handle(RouterTook(router=router)) == [told(router, 2)]
    assert node.handle(RouterTook(router=router)) == []


def test_a_node_that_drains_takes_nothing_new() -> None:
    node = Node(slots=4)
    node.store(CHAIN[0])
    node.core.draining = True
    assert not node.core.idle, "not on disk yet"
    node.handle(SlotsWritten(batch=1, outcomes=(SlotOutcome.WRITTEN,)))
    assert node.core.idle
    nothing = StoreGranted(request_no=2, indices=(), places=())
    assert node.say(StoreWanted(request_no=2, blocks=CHAIN[:2])) == [nothing]
    assert node.say(FetchWanted(request_no=3, hashes=(A,))) == [
        Fetched(request_no=3, places=(), checksums=())
    ]
    assert node.core.idle


def test_a_worker_that_breaks_the_protocol_is_dropped() -> None:
    node = Node()
    node.say(StoreWanted(request_no=1, blocks=CHAIN[:2]))
    again = node.say(StoreWanted(request_no=1, blocks=(LONE,)))
    assert again == [DropWorker(worker=ANN, reason="request 1 is open already")]
    short = node.say(Stored(request_no=1, checksums=(1,)))
    assert short == [DropWorker(worker=ANN, reason="1 checksums of 2 blocks")]
    assert node.core.books.counts()["free"] == 4
