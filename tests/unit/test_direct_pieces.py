"""Pieces that the decode worker reads itself, message by message, on both sides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode_worker.scheduler import DecodeScheduler
from engine.core.step import Command, StepWanted, Tick
from kvpool.core.transfer.commands import FetchPiece, LinkMeasured, PeerLost, PieceFetched, SendPeer
from kvpool.core.transfer.link_cost import LinkCost, TransferShape, TransferWay
from kvpool.core.transfer.messages import (
    CancelTransfer,
    Commit,
    Committed,
    PieceComputed,
    PiecesAhead,
    PiecesAwaited,
    PiecesRead,
    SlabLent,
    TransferCancelled,
)
from kvrelay.messages import Abort
from prefill_worker.scheduler import PrefillScheduler
from tests.unit.worker_kit import (
    FACTS,
    TTL_S,
    D,
    P,
    ahead,
    decode_scheduler,
    done,
    from_d,
    from_p,
    hello,
    key,
    local_lookup,
    names,
    prefill_of,
    prefill_scheduler,
    reserve,
    run,
    spec,
    to_peer,
)


def link(**changes: float) -> LinkCost:
    """A link on which reading directly is always the faster way."""
    coefficients = {
        "latency_s": 1e-4,
        "bytes_per_s": 1e9,
        "descriptor_s": 0.0,
        "direct_bytes_per_s": 1e9,
        "gather_bytes_per_s": 1e9,
        "scatter_bytes_per_s": 1e9,
        "run_s": 1e-3,
    }
    return LinkCost(transport="loopback", **(coefficients | changes))


def measured(**changes: float) -> LinkMeasured:
    return LinkMeasured(peer=P, cost=link(**changes))


def reserved(*names: str, **options: int) -> DecodeScheduler:
    scheduler = decode_scheduler(**options)
    scheduler.handle(measured(), 0)
    for name in names:
        scheduler.handle(reserve(spec(name, 3)), 0)
    return scheduler


def announced(scheduler: DecodeScheduler, name: str = "a") -> None:
    assert to_peer(scheduler.handle(from_p(ahead(name)), 0)) == [
        PiecesAwaited(key=key(name), pieces=(0,))
    ]


def reading(name: str = "a") -> tuple[DecodeScheduler, FetchPiece]:
    scheduler = reserved(name)
    announced(scheduler, name)
    (fetch,) = scheduler.handle(from_p(PieceComputed(key=key(name), piece=0)), 0)
    assert isinstance(fetch, FetchPiece)
    return scheduler, fetch


def fetched(name: str = "a", error: str | None = None, piece: int = 0) -> PieceFetched:
    return PieceFetched(key=key(name), piece=piece, bytes=12, seconds=0.5, error=error)


def commit(name: str = "a") -> Commit:
    return Commit(key=key(name), pieces=1, first_token_ids=(100,))


def assert_free(scheduler: DecodeScheduler) -> None:
    scheduler.validate()
    assert scheduler.batch.tables.free_blocks == scheduler.batch.tables.blocks
    assert scheduler.reservations.slabs.free == scheduler.reservations.slabs.count
    assert scheduler.sequences == 0


# --- the decode worker --------------------------------------------------------------------------


def test_the_pieces_of_a_span_are_awaited_together_and_told_when_all_are_read() -> None:
    scheduler = decode_scheduler()
    scheduler.handle(measured(), 0)
    scheduler.handle(reserve(spec("a", 19)), 0)
    assert to_peer(scheduler.handle(from_p(ahead("a", 19, count=3)), 0)) == [
        PiecesAwaited(key=key("a"), pieces=(0, 1, 2))
    ]
    told: list[Command] = []
    for number in range(3):
        (fetch,) = scheduler.handle(from_p(PieceComputed(key=key("a"), piece=number)), 0)
        assert isinstance(fetch, FetchPiece)
        assert (fetch.piece, len(fetch.source.tables[0])) == (number, 5)
        told += scheduler.handle(fetched(piece=number), 0)
    assert to_peer(told) == [PiecesRead(key=key("a"), pieces=(0, 1, 2))]


def test_it_reads_once_the_piece_is_computed_and_joins_once_it_is_committed() -> None:
    scheduler, fetch = reading()
    assert fetch.source.tables == ((0,),)
    assert (fetch.peer, fetch.kv) == (P, FACTS)
    assert scheduler.reservations.slabs.free == scheduler.reservations.slabs.count
    assert scheduler.handle(fetched(), 1) == [
        SendPeer(peer=P, message=PiecesRead(key=key("a"), pieces=(0,)))
    ]
    commands = scheduler.handle(from_p(commit()), 2)
    assert to_peer(commands) == [Committed(key=key("a"))]
    assert names(commands) == ["handoff_committed"]
    reservations = scheduler.reservations
    assert (reservations.transfers, reservations.transfer_bytes) == (1, 12)
    assert reservations.transfer_s == 0.5


@pytest.mark.parametrize("why", ["slow", "unmeasured", "unreadable", "lost before"])
def test_a_slab_is_lent_where_reading_is_not_possible_or_not_faster(why: str) -> None:
    scheduler = decode_scheduler()
    if why != "unmeasured":
        scheduler.handle(measured(descriptor_s=1.0 if why == "slow" else 0.0), 0)
    if why == "lost before":
        scheduler.handle(PeerLost(peer=P, reason="gone"), 0)
        scheduler.handle(hello(P), 0)
    if why == "unreadable":
        scheduler.handle(hello(P, replace(FACTS, region="")), 0)
    scheduler.handle(reserve(spec("a", 3)), 0)
    (answer,) = to_peer(scheduler.handle(from_p(ahead("a")), 0))
    assert isinstance(answer, SlabLent)


def test_what_is_asked_of_the_link_is_what_would_be_copied() -> None:
    asked: list[TransferShape] = []

    class Curious(LinkCost):
        def choose(self, shape: TransferShape) -> TransferWay:
            asked.append(shape)
            return TransferWay.COLLATED

    scheduler = decode_scheduler()
    cost = link()
    curious = Curious(**{name: getattr(cost, name) for name in LinkCost.__dataclass_fields__})
    scheduler.handle(LinkMeasured(peer=P, cost=curious), 0)
    scheduler.handle(reserve(spec("a", 8)), 0)
    scheduler.handle(from_p(ahead("a", 8, blocks=(7, 3))), 0)
    assert asked == [TransferShape(nbytes=32, descriptors=2, source_runs=2, target_runs=1)]


@pytest.mark.parametrize("blocks", [(7,), (99, 1), (0, 1, 2)])
def test_blocks_that_the_peer_does_not_have_are_not_read(blocks: tuple[int, ...]) -> None:
    scheduler = decode_scheduler()
    scheduler.handle(measured(), 0)
    scheduler.handle(reserve(spec("a", 8)), 0)
    (answer,) = to_peer(scheduler.handle(from_p(ahead("a", 8, blocks=blocks)), 0))
    assert isinstance(answer, CancelTransfer)
    assert "piece" in answer.reason


def test_a_failed_read_fails_the_request_and_the_next_goes_through_a_slab() -> None:
    scheduler, _ = reading()
    commands = scheduler.handle(fetched(error="the region is gone"), 1)
    assert to_peer(commands) == [CancelTransfer(key=key("a"), reason="the region is gone")]
    assert names(commands) == ["RequestFailed", "Released"]
    scheduler.handle(reserve(spec("b", 3)), 1)
    (answer,) = to_peer(scheduler.handle(from_p(ahead("b")), 1))
    assert isinstance(answer, SlabLent)
    scheduler.handle(Abort(key=key("b")), 2)
    scheduler.handle(from_p(TransferCancelled(key=key("b"), reason="aborted")), 2)
    assert_free(scheduler)


@pytest.mark.parametrize("end", ["abort", "fence", "lost", "lease"])
def test_blocks_are_kept_while_a_read_into_them_runs_and_it_never_joins(end: str) -> None:
    """The late reader: what it has read by then may be another's KV."""
    scheduler, _ = reading()
    match end:
        case "abort":
            scheduler.handle(Abort(key=key("a")), 1)
        case "fence":
            scheduler.handle(from_p(TransferCancelled(key=key("a"), reason="aborted")), 1)
        case "lost":
            scheduler.handle(PeerLost(peer=P, reason="gone"), 1)
        case "lease":
            assert "RequestFailed" in names(scheduler.handle(Tick(), TTL_S))
    assert scheduler.batch.tables.free_blocks < scheduler.batch.tables.blocks
    assert scheduler.handle(from_p(commit()), TTL_S) == []
    late = scheduler.handle(fetched(), TTL_S + 1)
    assert to_peer(late) == []  # nobody is told that it was read
    assert names(late) == ["Released"]
    assert_free(scheduler)


@pytest.mark.parametrize("end", ["abort", "fence", "lost", "lease"])
def test_a_piece_that_was_awaited_is_not_read_any_more(end: str) -> None:
    scheduler = reserved("a")
    announced(scheduler)
    match end:
        case "abort":
            scheduler.handle(Abort(key=key("a")), 1)
        case "fence":
            scheduler.handle(from_p(TransferCancelled(key=key("a"), reason="aborted")), 1)
        case "lost":
            scheduler.handle(PeerLost(peer=P, reason="gone"), 1)
        case "lease":
            scheduler.handle(Tick(), TTL_S)
    assert scheduler.handle(from_p(PieceComputed(key=key("a"), piece=0)), TTL_S) == []
    assert_free(scheduler)


def test_a_piece_computed_twice_or_by_another_is_read_once() -> None:
    scheduler, _ = reading()
    computed = PieceComputed(key=key("a"), piece=0)
    assert scheduler.handle(from_p(computed), 1) == []
    assert scheduler.handle(from_p(PieceComputed(key=key("a"), piece=5)), 1) == []
    other = reserved("b")
    announced(other, "b")
    assert other.handle(from_d(PieceComputed(key=key("b"), piece=0)), 1) == []


# --- the prefill worker -------------------------------------------------------------------------


def computed(*, awaited: bool = True) -> tuple[PrefillScheduler, list[Command]]:
    """A prompt of 3 tokens in its only piece, and what its step leaves behind."""
    scheduler = prefill_scheduler()
    scheduler.handle(prefill_of(spec("a", 3)), 0)
    scheduler.handle(StepWanted(), 0)
    if awaited:
        assert scheduler.handle(from_d(PiecesAwaited(key=key("a"), pieces=(0,))), 0) == []
    return scheduler, done(scheduler, (9,))


READ = from_d(PiecesRead(key=key("a"), pieces=(0,)))


def test_it_says_what_is_computed_and_commits_what_was_read() -> None:
    scheduler, commands = computed()
    assert to_peer(commands) == [PieceComputed(key=key("a"), piece=0)]
    assert to_peer(scheduler.handle(READ, 1)) == [
        Commit(key=key("a"), pieces=1, first_token_ids=(9,))
    ]
    assert scheduler.handle(READ, 1) == []
    assert names(scheduler.handle(from_d(Committed(key=key("a"))), 2)) == ["Released"]


def test_awaited_after_it_was_computed() -> None:
    scheduler, commands = computed(awaited=False)
    assert to_peer(commands) == []
    awaited = from_d(PiecesAwaited(key=key("a"), pieces=(0,)))
    assert to_peer(scheduler.handle(awaited, 1)) == [PieceComputed(key=key("a"), piece=0)]
    assert scheduler.handle(awaited, 1) == []


def test_read_before_it_was_computed_commits_nothing() -> None:
    """No healthy peer says so."""
    scheduler = prefill_scheduler()
    scheduler.handle(prefill_of(spec("a", 3)), 0)
    scheduler.handle(StepWanted(), 0)
    assert scheduler.handle(READ, 0) == []
    assert to_peer(done(scheduler, (9,))) == []


@pytest.mark.parametrize("end", ["abort", "cancel", "lost"])
def test_blocks_are_free_at_once_though_they_may_be_read(end: str) -> None:
    """Without the commit that follows PiecesRead, nothing that is read of them is ever used."""
    scheduler, _ = computed()
    match end:
        case "abort":
            commands = scheduler.handle(Abort(key=key("a")), 1)
        case "cancel":
            cancel = from_d(CancelTransfer(key=key("a"), reason="no room"))
            commands = scheduler.handle(cancel, 1)
        case _:
            commands = scheduler.handle(PeerLost(peer=D, reason="gone"), 1)
    assert names(commands)[-1] == "Released"
    assert not [m for m in to_peer(commands) if not isinstance(m, TransferCancelled)]
    assert scheduler.handle(READ, 2) == []
    scheduler.validate()
    assert scheduler.tables.free_blocks == scheduler.tables.blocks


def test_pieces_wait_for_the_peers_hello() -> None:
    """They are cut by what its slabs hold."""
    scheduler = PrefillScheduler(lookup=local_lookup(prefill_scheduler().tables), chunk_tokens=8)
    (connects,) = to_peer(scheduler.handle(prefill_of(spec("a", 3)), 0))
    assert not isinstance(connects, PiecesAhead)
    assert to_peer(run(scheduler, (9,))) == []
    assert to_peer(scheduler.handle(hello(D), 1)) == [ahead("a")]
    assert to_peer(scheduler.handle(prefill_of(spec("b", 3)), 2)) == []  # it is connected
    scheduler.handle(PeerLost(peer=D, reason="gone"), 3)
    assert len(to_peer(scheduler.handle(prefill_of(spec("c", 3)), 4))) == 1
