"""The decode worker's side of a handoff, through its scheduler: leases, slabs, fences."""

from __future__ import annotations

import pytest

from decode_worker.incoming import TRANSITIONS, HandoffState, IncomingHandoff
from decode_worker.scheduler import DecodeScheduler
from engine.core.step import Command, Emit, Tick
from kvpool.core.blocks.holding import Holder
from kvpool.core.transfer.commands import (
    FromPeer,
    PeerLost,
    ReplaceSlab,
    ScatterSlab,
    SendPeer,
    SlabReplaced,
    SlabScattered,
)
from kvpool.core.transfer.messages import (
    CancelTransfer,
    Commit,
    HandoffMode,
    PiecesAhead,
    RenewLeases,
    SlabFilled,
    SlabLent,
    TransferCancelled,
)
from kvpool.core.transfer.slabs import LeaseId, SlabId, SlabState
from kvrelay.errors import FailureReason
from kvrelay.messages import Abort, Released, RequestFailed, Reserve
from kvrelay.types import Incarnation
from tests.unit.worker_kit import (
    TTL_S,
    D,
    P,
    ahead,
    decode_scheduler,
    events,
    from_p,
    key,
    names,
    reserve,
    spec,
    to_peer,
)

TIMEOUT = "no progress from the prefill worker in 30 s"


def reserved(*names: str, slabs: int = 2) -> DecodeScheduler:
    scheduler = decode_scheduler(slabs=slabs)
    for name in names:
        scheduler.handle(reserve(spec(name, 3)), 0)
    return scheduler


def want(scheduler: DecodeScheduler, name: str, piece: int = 0, now_s: float = 0) -> list[SlabLent]:
    lent = to_peer(scheduler.handle(from_p(ahead(name, number=piece)), now_s))
    assert all(isinstance(message, SlabLent) for message in lent)
    return lent  # type: ignore[return-value]


def fill(scheduler: DecodeScheduler, lent: SlabLent, now_s: float = 0) -> list[Command]:
    filled = SlabFilled(
        key=lent.key, piece=lent.piece, slab_id=lent.slab_id, lease_id=lent.lease_id
    )
    return scheduler.handle(from_p(filled), now_s)


def scattered(lent: SlabLent, error: str | None = None) -> SlabScattered:
    return SlabScattered(
        key=lent.key,
        piece=lent.piece,
        slab_id=lent.slab_id,
        lease_id=lent.lease_id,
        bytes=5,
        seconds=0.25,
        error=error,
    )


def fence(name: str) -> TransferCancelled:
    return TransferCancelled(key=key(name), reason="aborted")


def assert_free(scheduler: DecodeScheduler) -> None:
    scheduler.validate()
    slabs = scheduler.reservations.slabs
    assert scheduler.batch.tables.free_blocks == scheduler.batch.tables.blocks
    assert slabs.counts()[SlabState.FREE] == slabs.count
    assert scheduler.sequences == 0


def test_slabs_are_lent_in_order_of_asking_as_they_come_free() -> None:
    scheduler = reserved("a", "b", slabs=1)
    (first,) = want(scheduler, "a")
    assert (first.slab_id, first.region, first.lease_id) == (0, "region-0", 1)
    assert want(scheduler, "b") == []
    assert want(scheduler, "a", piece=1) == []
    assert [type(c) for c in fill(scheduler, first)] == [ScatterSlab]
    (second,) = to_peer(scheduler.handle(scattered(first), 0))
    assert isinstance(second, SlabLent)
    assert (second.key, second.slab_id, second.lease_id) == (key("b"), 0, 2)


def test_a_slab_for_no_reservation_is_refused() -> None:
    scheduler = decode_scheduler()
    assert scheduler.handle(from_p(ahead("a")), 0) == [
        SendPeer(peer=P, message=CancelTransfer(key=key("a"), reason="no such reservation"))
    ]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (ahead("a", 4), "a piece of tokens [0, 4) of 4, but [0, 3) of 3 are wanted"),
        (ahead("a", 3, end=5), "a piece of tokens [0, 5) of 3, but [0, 3) of 3 are wanted"),
        (ahead("a", 3, index=1), "piece 1 of tokens [0, 3) has nothing to send"),
        (ahead("a", 3, count=2), "piece 1 of tokens [0, 3) has nothing to send"),
        (ahead("a", 3, count=0), "piece 0 of tokens [0, 3) has nothing to send"),
        (ahead("a", 3, start=3), "piece 0 of tokens [3, 3) has nothing to send"),
    ],
)
def test_a_piece_that_is_not_of_the_prompts_cut_is_refused(wrong: PiecesAhead, reason: str) -> None:
    scheduler = reserved("a")
    assert to_peer(scheduler.handle(from_p(wrong), 0)) == [
        CancelTransfer(key=key("a"), reason=reason)
    ]
    assert scheduler.reservations.slabs.free == scheduler.reservations.slabs.count


def test_a_piece_announced_twice_gets_one_slab() -> None:
    scheduler = reserved("a")
    assert len(want(scheduler, "a")) == 1
    assert want(scheduler, "a") == []


def test_the_pieces_of_a_span_are_announced_together_and_get_a_slab_each() -> None:
    scheduler = decode_scheduler(slabs=2)
    scheduler.handle(reserve(spec("a", 19)), 0)
    lent = to_peer(scheduler.handle(from_p(ahead("a", 19, number=4, count=3)), 0))
    assert [m.piece for m in lent if isinstance(m, SlabLent)] == [4, 5]  # as many as there are


def test_abort_fences_the_lent_slab_until_the_writer_says_so() -> None:
    scheduler = reserved("a")
    (lent,) = want(scheduler, "a")
    assert scheduler.handle(Abort(key=key("a")), 1) == [
        SendPeer(peer=P, message=CancelTransfer(key=key("a"), reason="aborted")),
        Emit(events=(Released(key=key("a"), at_s=1),)),
    ]
    assert scheduler.reservations.slabs.counts()[SlabState.FENCING] == 1
    assert fill(scheduler, lent) == []  # its write was under way; it is not scattered
    assert scheduler.reservations.slabs.counts()[SlabState.FENCING] == 1
    assert scheduler.handle(from_p(fence("a")), 2) == []
    assert_free(scheduler)


def test_a_fence_lets_the_next_writer_in() -> None:
    scheduler = reserved("a", "b", slabs=1)
    want(scheduler, "a")
    assert want(scheduler, "b") == []
    scheduler.handle(Abort(key=key("a")), 1)
    assert [type(m) for m in to_peer(scheduler.handle(from_p(fence("a")), 2))] == [SlabLent]


def test_the_writer_cancels_by_itself() -> None:
    scheduler = reserved("a")
    want(scheduler, "a")
    assert scheduler.handle(from_p(fence("a")), 1) == [
        Emit(events=(Released(key=key("a"), at_s=1),))
    ]
    assert_free(scheduler)


def test_abort_during_a_scatter_keeps_the_blocks_until_it_is_over() -> None:
    scheduler = reserved("a")
    (lent,) = want(scheduler, "a")
    fill(scheduler, lent)
    assert names(scheduler.handle(Abort(key=key("a")), 1)) == []
    assert scheduler.batch.tables.free_blocks < scheduler.batch.tables.blocks
    assert scheduler.sequences == 0  # its place in the batch is free at once
    assert names(scheduler.handle(scattered(lent), 2)) == ["Released"]
    assert_free(scheduler)


def test_a_damaged_slab_fails_the_request() -> None:
    scheduler = reserved("a")
    (lent,) = want(scheduler, "a")
    fill(scheduler, lent)
    commands = scheduler.handle(scattered(lent, "wrong checksum"), 1)
    assert to_peer(commands) == [CancelTransfer(key=key("a"), reason="wrong checksum")]
    assert events(commands) == [
        RequestFailed(key=key("a"), at_s=1, reason="transfer_failed", message="wrong checksum"),
        Released(key=key("a"), at_s=1),
    ]
    assert_free(scheduler)


def test_a_reservation_nobody_renews_ends() -> None:
    scheduler = reserved("a")
    assert scheduler.handle(Tick(), TTL_S - 1) == []
    commands = scheduler.handle(Tick(), TTL_S)
    assert to_peer(commands) == [CancelTransfer(key=key("a"), reason=TIMEOUT)]
    assert events(commands) == [
        RequestFailed(key=key("a"), at_s=TTL_S, reason="handoff_timeout", message=TIMEOUT),
        Released(key=key("a"), at_s=TTL_S),
    ]
    assert_free(scheduler)


def test_a_renewal_keeps_reservation_and_slabs() -> None:
    scheduler = reserved("a")
    want(scheduler, "a")
    scheduler.handle(from_p(RenewLeases(keys=(key("a"), key("unknown")))), TTL_S - 1)
    assert scheduler.handle(Tick(), TTL_S + 1) == []


def failed_at(scheduler: DecodeScheduler, now_s: float) -> list[str]:
    """By a tick; half a lease before, both were said to wait for this worker."""
    waiting = RenewLeases(keys=(), waiting=(key("a"), key("b")))
    scheduler.handle(from_p(waiting), now_s - TTL_S / 2)
    found = events(scheduler.handle(Tick(), now_s))
    return [event.key.request_id for event in found if isinstance(event, RequestFailed)]


def test_who_is_said_to_wait_for_this_worker_must_do_so() -> None:
    """For a slab that another holds, or for a scatter; not for what the other side owes."""
    scheduler = reserved("a", "b", slabs=1)
    (first,) = want(scheduler, "a")
    want(scheduler, "b")
    fill(scheduler, first)
    assert failed_at(scheduler, TTL_S) == []
    assert failed_at(scheduler, 2 * TTL_S) == []
    (second,) = to_peer(scheduler.handle(scattered(first), 2 * TTL_S))
    assert isinstance(second, SlabLent) and second.key == key("b")
    assert failed_at(scheduler, 2.6 * TTL_S) == ["a", "b"]


def test_a_silent_prefill_worker_gets_no_time_for_what_waits_for_this_one() -> None:
    scheduler = reserved("a", "b", slabs=1)
    want(scheduler, "a")
    want(scheduler, "b")
    assert names(scheduler.handle(Tick(), TTL_S)).count("RequestFailed") == 2


def test_an_abort_gives_a_silent_writer_no_more_time() -> None:
    scheduler = reserved("a")
    (lent,) = want(scheduler, "a")
    scheduler.handle(Abort(key=key("a")), TTL_S - 1)
    assert scheduler.handle(Tick(), TTL_S - 0.1) == []
    assert scheduler.handle(Tick(), TTL_S) == [ReplaceSlab(slab_id=lent.slab_id)]


def test_requests_fail_for_the_reason_for_which_the_peer_was_lost() -> None:
    scheduler = reserved("a")
    lost = PeerLost(peer=P, reason="2 s", failure=FailureReason.TRANSFER_TIMEOUT)
    assert events(scheduler.handle(lost, 1))[0] == RequestFailed(
        key=key("a"), at_s=1, reason="transfer_timeout", message="2 s"
    )


def test_a_slab_nobody_renews_is_retired_and_replaced() -> None:
    scheduler = reserved("a")
    (lent,) = want(scheduler, "a")
    commands = scheduler.handle(Tick(), TTL_S)
    assert ReplaceSlab(slab_id=lent.slab_id) in commands
    assert names(commands) == ["RequestFailed", "Released"]
    assert fill(scheduler, lent, TTL_S) == []  # late
    assert scheduler.handle(from_p(fence("a")), TTL_S) == []
    scheduler.handle(SlabReplaced(slab_id=lent.slab_id, region="fresh"), TTL_S)
    assert_free(scheduler)
    scheduler.handle(reserve(spec("b", 3)), TTL_S)
    (again,) = want(scheduler, "b", now_s=TTL_S)
    assert (again.slab_id, again.region) == (lent.slab_id, "fresh")


def test_a_request_that_lost_one_of_its_slabs_fails_though_others_made_progress() -> None:
    """Its piece would never come, while the prefill worker renews for ever."""
    scheduler = reserved("a")
    (first,) = want(scheduler, "a")
    want(scheduler, "a", piece=1)
    fill(scheduler, first, now_s=TTL_S / 2)  # renews the reservation, not the other slab
    commands = scheduler.handle(Tick(), TTL_S)
    assert names(commands) == ["RequestFailed"]
    assert to_peer(commands) == [CancelTransfer(key=key("a"), reason=TIMEOUT)]
    assert names(scheduler.handle(scattered(first), TTL_S)) == ["Released"]


@pytest.mark.parametrize("state", ["reserved", "lent", "scattering", "committed", "fencing"])
def test_a_lost_peer_at_every_state(state: str) -> None:
    scheduler = reserved("a")
    lent = want(scheduler, "a") if state != "reserved" else []
    heard: list[str] = []
    if state in ("scattering", "committed"):
        fill(scheduler, lent[0])
    if state == "committed":
        commit = Commit(key=key("a"), pieces=1, first_token_ids=(9,))
        scheduler.handle(from_p(commit), 0)
    if state == "fencing":
        heard += ["RequestFailed", *names(scheduler.handle(Abort(key=key("a")), 0))]
    commands = scheduler.handle(PeerLost(peer=P, reason="gone"), 1)
    assert to_peer(commands) == []
    heard += names(commands)
    replaced = [c.slab_id for c in commands if isinstance(c, ReplaceSlab)]
    assert bool(replaced) == (state in ("lent", "fencing"))
    for slab_id in replaced:
        scheduler.handle(SlabReplaced(slab_id=slab_id, region="fresh"), 1)
    if state in ("scattering", "committed"):
        heard += names(scheduler.handle(scattered(lent[0]), 2))
    assert heard == ["RequestFailed", "Released"]
    assert scheduler.handle(from_p(fence("a")), 3) == []
    assert_free(scheduler)


def test_another_lost_peer_changes_nothing() -> None:
    scheduler = reserved("a")
    want(scheduler, "a")
    assert scheduler.handle(PeerLost(peer=D, reason="gone"), 1) == []


def test_the_wants_of_a_cancelled_request_are_forgotten() -> None:
    scheduler = reserved("a", "b", "c", slabs=1)
    (first,) = want(scheduler, "a")
    want(scheduler, "b")
    want(scheduler, "c")
    scheduler.handle(Abort(key=key("b")), 0)
    fill(scheduler, first)
    (lent,) = to_peer(scheduler.handle(scattered(first), 0))
    assert isinstance(lent, SlabLent)
    assert lent.key == key("c")


def test_a_slab_filled_under_a_foreign_name_or_lease_is_ignored() -> None:
    scheduler = reserved("a", "b")
    (lent,) = want(scheduler, "a")
    for name, slab_id, lease_id in (
        ("b", lent.slab_id, lent.lease_id),
        ("a", SlabId(1), lent.lease_id),
        ("a", SlabId(77), lent.lease_id),
        ("a", lent.slab_id, LeaseId(77)),
    ):
        filled = SlabFilled(key=key(name), piece=0, slab_id=slab_id, lease_id=lease_id)
        assert scheduler.handle(from_p(filled), 0) == []
    assert [type(c) for c in fill(scheduler, lent)] == [ScatterSlab]
    assert fill(scheduler, lent) == []  # twice


def test_messages_for_the_unknown_change_nothing() -> None:
    scheduler = decode_scheduler()
    for message in (fence("a"), RenewLeases(keys=(key("a"),))):
        assert scheduler.handle(from_p(message), 0) == []
    assert scheduler.handle(PeerLost(peer=Incarnation("x"), reason="gone"), 0) == []
    assert_free(scheduler)


def test_a_commit_for_the_unknown_is_refused_so_that_its_sender_frees_it() -> None:
    """A request that was aborted here before anything of it came; with `pool` no piece does."""
    scheduler = decode_scheduler()
    commit = Commit(key=key("a"), pieces=0, first_token_ids=(9,))
    (refusal,) = to_peer(scheduler.handle(from_p(commit), 0))
    assert refusal == CancelTransfer(key=key("a"), reason="no such reservation")
    assert_free(scheduler)


def test_a_commit_that_counts_too_few_pieces_waits_for_the_scatter() -> None:
    scheduler = reserved("a")
    slabs = [*want(scheduler, "a"), *want(scheduler, "a", piece=1)]
    for slab in slabs:
        fill(scheduler, slab)
    scheduler.handle(from_p(Commit(key=key("a"), pieces=1, first_token_ids=(9,))), 0)
    assert names(scheduler.handle(scattered(slabs[0]), 0)) == []
    scheduler.handle(scattered(slabs[1]), 0)
    scheduler.validate()


# --- reservations that leave open who comes ------------------------------------------------------

OTHER = Incarnation("other")


def open_to_all(name: str = "a") -> DecodeScheduler:
    scheduler = decode_scheduler()
    scheduler.handle(Reserve(spec=spec(name, 3), source=None), 0)
    return scheduler


def test_who_comes_first_is_the_one() -> None:
    scheduler = open_to_all()
    assert want(scheduler, "a")
    late = FromPeer(peer=OTHER, message=ahead("a"))
    (cancel,) = scheduler.handle(late, 1)
    assert cancel == SendPeer(
        peer=OTHER, message=CancelTransfer(key=key("a"), reason="no such reservation")
    )
    assert events(scheduler.handle(PeerLost(peer=OTHER, reason="gone"), 1)) == []
    lost = scheduler.handle(PeerLost(peer=P, reason="gone"), 1)
    assert names(lost) == ["RequestFailed", "Released"]


def test_it_lasts_while_nobody_has_come_and_then_as_long_as_somebody_goes_on() -> None:
    scheduler = open_to_all()
    for n in range(1, 6):
        assert scheduler.handle(Tick(), n * TTL_S) == []
    want(scheduler, "a", now_s=5 * TTL_S)
    assert "RequestFailed" in names(scheduler.handle(Tick(), 6 * TTL_S))


def test_one_that_nobody_has_come_for_is_given_up_without_a_word_to_anyone() -> None:
    scheduler = open_to_all()
    assert events(scheduler.handle(Abort(key=key("a")), 1)) == [Released(key=key("a"), at_s=1)]
    assert_free(scheduler)


# --- states ------------------------------------------------------------------------------------


def state(scheduler: DecodeScheduler, name: str = "a") -> HandoffState | None:
    incoming = scheduler.reservations._incoming.get(key(name))
    return incoming.state if incoming else None


def test_a_pushed_handoff_goes_from_state_to_state() -> None:
    scheduler = reserved("a")
    assert state(scheduler) is HandoffState.RESERVED
    (lent,) = want(scheduler, "a")
    assert state(scheduler) is HandoffState.RECEIVING
    fill(scheduler, lent)
    commit = Commit(key=key("a"), pieces=1, first_token_ids=(7,))
    scheduler.handle(from_p(commit), 0)
    assert state(scheduler) is HandoffState.RECEIVING  # its slab is still being scattered
    assert names(scheduler.handle(scattered(lent), 1)) == ["handoff_committed"]
    assert state(scheduler) is None


def test_a_pulled_handoff_awaits_blocks_before_it_receives() -> None:
    scheduler = decode_scheduler(blocks=2, slabs=2, mode=HandoffMode.PULL)
    for name in ("a", "b"):
        scheduler.handle(reserve(spec(name, 3)), 0)
        want(scheduler, name)
    assert state(scheduler) is HandoffState.RECEIVING
    scheduler.handle(reserve(spec("c", 3)), 0)
    assert state(scheduler, "c") is HandoffState.RESERVED
    assert want(scheduler, "c") == []
    assert state(scheduler, "c") is HandoffState.AWAITING_BLOCKS
    scheduler.handle(Abort(key=key("a")), 1)
    assert state(scheduler, "c") is HandoffState.RECEIVING


def test_a_handoff_that_is_given_up_drains_first() -> None:
    scheduler = reserved("a")
    (lent,) = want(scheduler, "a")
    fill(scheduler, lent)
    scheduler.handle(Abort(key=key("a")), 1)
    assert state(scheduler) is HandoffState.DRAINING
    scheduler.handle(scattered(lent), 2)
    assert state(scheduler) is None


def test_only_the_transitions_of_the_table_are_possible() -> None:
    for before in HandoffState:
        for after in HandoffState:
            incoming = IncomingHandoff(
                message=reserve(spec("a", 3)),
                holder=Holder("decode", key("a")),
                names=decode_scheduler().batch.tables.chain("", 3),
                source=P,
                state=before,
            )
            if after in TRANSITIONS[before]:
                incoming.enter(after)
                assert incoming.state is after
            else:
                with pytest.raises(AssertionError, match=f"a.*{before} -> {after}"):
                    incoming.enter(after)


@pytest.mark.parametrize("lost", ["lease", "choices", "blocks", "line", "slab", "reservation"])
def test_the_law_notices_what_belongs_to_no_request(lost: str) -> None:
    scheduler = reserved("a")
    (lent,) = want(scheduler, "a")
    scheduler.validate()
    reservations = scheduler.reservations
    match lost:
        case "lease":
            reservations.leases.end(key("a"))
        case "choices":
            reservations.choices += 1
        case "blocks":
            reservations.tables.release(Holder("decode", key("a")))
        case "line":
            reservations.awaiting_blocks.append(reservations._incoming[key("a")])
        case "slab":
            reservations.slabs.fence_acknowledged(lent.slab_id, lent.lease_id)
        case "reservation":
            del reservations._incoming[key("a")]
    with pytest.raises(AssertionError):
        scheduler.validate()
