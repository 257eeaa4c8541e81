from __future__ import annotations

from dataclasses import replace

import pytest

from engine.core.step import (
    Emit,
    RunStep,
    Sampled,
    SampleRequest,
    SequenceSlice,
    StepBatch,
    StepDone,
    StepOutcome,
    StepWanted,
    Tick,
)
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.client_events import OfferBlocks, OfferConfirmed
from kvpool.core.fetch.cost import RestoreCost
from kvpool.core.fetch.prefix_lookup import PoolUse, PrefixLookup
from kvpool.core.transfer.commands import PeerLost, SendPeer, SlabWritten, WriteSlab
from kvpool.core.transfer.messages import (
    CancelTransfer,
    Commit,
    Committed,
    HandoffMode,
    PeerMessage,
    PiecesAhead,
    PrefixStored,
    RenewLeases,
    SlabLent,
    TransferCancelled,
)
from kvpool.core.transfer.piece import Piece, PieceBlocks, cut_span
from kvpool.core.transfer.slabs import LeaseId, SlabId
from kvpool.core.transfer.write import TokenSpan
from kvrelay.errors import FailureReason
from kvrelay.messages import Abort, Lifetime, Released, RequestFailed, Tokens
from kvrelay.types import FinishReason
from prefill_worker.scheduler import MOST_RENEWED, PrefillScheduler
from tests.unit.worker_kit import (
    BLOCK,
    FACTS,
    LAYOUT,
    TOKEN_BYTES,
    D,
    P,
    ahead,
    done,
    events,
    from_d,
    hello,
    key,
    local_lookup,
    names,
    prefill_of,
    prefill_scheduler,
    run,
    spec,
    the_step,
    to_peer,
)


def lent(name: str, piece: int, slab: int = 0) -> SlabLent:
    return SlabLent(
        key=key(name),
        piece=piece,
        slab_id=SlabId(slab),
        region=f"region-{slab}",
        lease_id=LeaseId(slab + 1),
    )


def write_of(name: str, tokens: int) -> WriteSlab:
    """The only piece of a prompt in the first block."""
    piece = ahead(name, tokens).piece
    (write,) = cut_span(LAYOUT, piece.span, FACTS.slab_bytes)
    return WriteSlab(peer=D, lent=lent(name, 0), piece=piece, write=write, tables=((0,),))


def written(name: str, piece: int, error: str | None = None) -> SlabWritten:
    return SlabWritten(key=key(name), piece=piece, bytes=7, seconds=0.5, error=error)


def assert_gone(scheduler: PrefillScheduler) -> None:
    scheduler.validate()
    assert scheduler.tables.free_blocks == scheduler.tables.blocks
    assert scheduler.jobs.handing_over == len(scheduler.queue) == 0
    assert scheduler.handle(StepWanted(), 9) == []


def writing(name: str = "a") -> PrefillScheduler:
    """A prompt of 3 tokens whose only piece is being written."""
    scheduler = prefill_scheduler()
    scheduler.handle(prefill_of(spec(name, 3)), 0)
    run(scheduler, (9,))
    (write,) = scheduler.handle(from_d(lent(name, 0)), 1)
    assert isinstance(write, WriteSlab)
    return scheduler


def committing(name: str = "a") -> PrefillScheduler:
    scheduler = writing(name)
    (commit,) = to_peer(scheduler.handle(written(name, 0), 1))
    assert isinstance(commit, Commit)
    return scheduler


def test_what_an_earlier_attempt_emitted_counts_in_the_draw() -> None:
    scheduler = prefill_scheduler()
    scheduler.handle(prefill_of(replace(spec("a", 3), emitted_ids=(7, 8))), 1)
    (piece,) = the_step(scheduler.handle(StepWanted(), 2)).batch.slices
    assert (piece.token_ids, piece.index) == ((0, 1, 2, 7, 8), 2)


def test_a_short_prompt_from_arrival_to_release() -> None:
    scheduler = prefill_scheduler()
    request = spec("a", 3)
    assert scheduler.handle(prefill_of(request), 1) == [
        Emit(events=(Lifetime(key=key("a"), at_s=1, name="prefill_received"),))
    ]
    started = scheduler.handle(StepWanted(), 2)
    sample = SampleRequest(sampling=request.sampling, choice=0, prompt_ids=(), emitted_ids=())
    piece = SequenceSlice(
        key=key("a"),
        choice=0,
        token_ids=(0, 1, 2),
        start=0,
        tables=((0,),),
        samples=(sample,),
        prompt_tokens=3,
    )
    assert started == [
        Emit(events=(Lifetime(key=key("a"), at_s=2, name="prefill_started", source="computed"),)),
        SendPeer(peer=D, addresses=("sim:d",), message=ahead("a")),
        RunStep(batch=StepBatch(slices=(piece,))),
    ]
    first = Tokens(key=key("a"), at_s=3, choice=0, first_index=0, token_ids=(9,))
    chunk = Lifetime(key=key("a"), at_s=3, name="prefill_chunk", tokens=3)
    assert done(scheduler, (9,), now_s=3) == [Emit(events=(chunk, first))]
    assert scheduler.handle(from_d(lent("a", 0)), 4) == [write_of("a", 3)]
    commit = Commit(key=key("a"), pieces=1, first_token_ids=(9,))
    assert scheduler.handle(written("a", 0), 5) == [
        SendPeer(peer=D, addresses=("sim:d",), message=commit)
    ]
    sent = scheduler.handoffs
    assert (sent.transfers, sent.transfer_bytes, sent.transfer_s) == (1, 7, 0.5)
    assert scheduler.handle(from_d(Committed(key=key("a"))), 6) == [
        Emit(events=(Released(key=key("a"), at_s=6),))
    ]
    assert_gone(scheduler)


def test_prompts_are_packed_under_the_token_budget() -> None:
    scheduler = prefill_scheduler(chunk=8)
    for name, tokens in (("a", 5), ("b", 6), ("c", 7)):
        scheduler.handle(prefill_of(spec(name, tokens)), 0)
    assert scheduler.queue.tokens == 18
    batch = the_step(scheduler.handle(StepWanted(), 0)).batch
    assert [(s.key.request_id, s.start, s.token_ids) for s in batch.slices] == [
        ("a", 0, (0, 1, 2, 3, 4)),
        ("b", 0, (0, 1, 2)),
    ]
    assert [len(s.samples) for s in batch.slices] == [1, 0]
    done(scheduler, (9,), ())
    batch = the_step(scheduler.handle(StepWanted(), 0)).batch
    assert [(s.key.request_id, s.start, s.token_ids) for s in batch.slices] == [
        ("b", 3, (3, 4, 5)),
        ("c", 4, (4, 5, 6)),
    ]
    assert [s.prompt_tokens for s in batch.slices] == [6, 7]


@pytest.mark.parametrize(
    ("tokens", "chunks"), [(1, [1]), (7, [7]), (8, [8]), (9, [8, 1]), (16, [8, 8]), (17, [8, 8, 1])]
)
def test_chunk_borders(tokens: int, chunks: list[int]) -> None:
    scheduler = prefill_scheduler(chunk=8)
    scheduler.handle(prefill_of(spec("a", tokens)), 0)
    seen, pieces = [], []
    for i, size in enumerate(chunks):
        commands = scheduler.handle(StepWanted(), 0)
        pieces += [m.number for m in to_peer(commands) if isinstance(m, PiecesAhead)]
        (only,) = the_step(commands).batch.slices
        seen.append(len(only.token_ids))
        assert bool(only.samples) == (i == len(chunks) - 1)
        done(scheduler, (9,) if only.samples else (), now_s=0)
        assert seen[-1] == size
    assert pieces == list(range(len(chunks)))


def test_a_chunk_longer_than_a_slab_leaves_in_pieces() -> None:
    scheduler = prefill_scheduler(chunk=20)
    scheduler.handle(prefill_of(spec("a", 19)), 0)
    (announced,) = to_peer(scheduler.handle(StepWanted(), 0))
    span = TokenSpan(start=0, tokens=19, next_position=19)
    writes = cut_span(LAYOUT, span, FACTS.slab_bytes)
    assert sum(write.nbytes for write in writes) == 19 * TOKEN_BYTES
    assert isinstance(announced, PiecesAhead)
    assert [*announced.numbered()] == [(i, Piece(span=span, index=i)) for i in range(3)]
    assert announced.held == (PieceBlocks(group=0, first=0, runs=((0, 5),)),)


def test_a_slab_lent_before_its_piece_is_computed_waits() -> None:
    scheduler = prefill_scheduler()
    scheduler.handle(prefill_of(spec("a", 3)), 0)
    scheduler.handle(StepWanted(), 0)
    assert scheduler.handle(from_d(lent("a", 0)), 0) == []
    assert [c for c in done(scheduler, (9,)) if isinstance(c, WriteSlab)] == [write_of("a", 3)]


def test_only_the_head_of_the_queue_waits_for_blocks() -> None:
    scheduler = prefill_scheduler(blocks=2, chunk=8)
    for name in ("a", "b"):
        scheduler.handle(prefill_of(spec(name, 6)), 0)
    (only,) = the_step(scheduler.handle(StepWanted(), 0)).batch.slices
    assert only.key == key("a")
    done(scheduler, (9,))
    assert scheduler.handle(StepWanted(), 0) == []
    assert len(scheduler.queue) == 1
    scheduler.handle(Abort(key=key("a")), 0)
    (only,) = the_step(scheduler.handle(StepWanted(), 0)).batch.slices
    assert only.key == key("b")


def test_abort_before_the_first_step() -> None:
    scheduler = prefill_scheduler()
    scheduler.handle(prefill_of(spec("a", 3)), 0)
    assert scheduler.handle(Abort(key=key("a")), 1) == [
        SendPeer(
            peer=D,
            addresses=("sim:d",),
            message=TransferCancelled(key=key("a"), reason="aborted"),
        ),
        Emit(events=(Released(key=key("a"), at_s=1),)),
    ]
    assert_gone(scheduler)


def test_abort_of_what_is_not_here() -> None:
    assert prefill_scheduler().handle(Abort(key=key("a")), 0) == []


def test_abort_between_a_step_and_its_outcome() -> None:
    scheduler = prefill_scheduler()
    scheduler.handle(prefill_of(spec("a", 3)), 0)
    scheduler.handle(StepWanted(), 0)
    assert scheduler.handle(Abort(key=key("a")), 1) == []
    assert scheduler.tables.free_blocks < scheduler.tables.blocks
    commands = done(scheduler, (9,), now_s=2)
    assert names(commands) == ["prefill_chunk", "Released"]
    assert to_peer(commands) == [TransferCancelled(key=key("a"), reason="aborted")]
    assert_gone(scheduler)


def test_abort_with_a_write_in_flight_keeps_blocks_and_fence_until_it_is_over() -> None:
    scheduler = writing()
    assert scheduler.handle(Abort(key=key("a")), 2) == []
    assert scheduler.tables.free_blocks < scheduler.tables.blocks
    commands = scheduler.handle(written("a", 0), 3)
    assert to_peer(commands) == [TransferCancelled(key=key("a"), reason="aborted")]
    assert names(commands) == ["Released"]
    assert scheduler.handoffs.transfers == 0
    assert_gone(scheduler)


def test_a_slab_lent_after_the_abort_is_not_written() -> None:
    scheduler = writing()
    scheduler.handle(Abort(key=key("a")), 2)
    assert scheduler.handle(from_d(lent("a", 0)), 2) == []
    scheduler.handle(written("a", 0), 3)
    assert scheduler.handle(from_d(lent("a", 0)), 4) == []


def test_nothing_is_handed_over_when_every_choice_ends_with_its_first_token() -> None:
    scheduler = prefill_scheduler()
    scheduler.handle(prefill_of(spec("a", 3, n=2, stops=(9,))), 0)
    commands = run(scheduler, (9, 9))
    tokens = [e for e in events(commands) if isinstance(e, Tokens)]
    assert [(t.choice, t.finish_reason, t.stop_token_id) for t in tokens] == [
        (0, FinishReason.STOP, 9),
        (1, FinishReason.STOP, 9),
    ]
    reason = "finished with its first token"
    assert to_peer(commands) == [TransferCancelled(key=key("a"), reason=reason)]
    assert names(commands)[-1] == "Released"
    assert_gone(scheduler)


def test_some_choices_end_with_their_first_token() -> None:
    scheduler = prefill_scheduler()
    scheduler.handle(prefill_of(spec("a", 3, n=3, stops=(9,))), 0)
    run(scheduler, (9, 7, 8))
    scheduler.handle(from_d(lent("a", 0)), 1)
    assert to_peer(scheduler.handle(written("a", 0), 1)) == [
        Commit(key=key("a"), pieces=1, first_token_ids=(9, 7, 8), finished_choices=(0,))
    ]


@pytest.mark.parametrize("since", [(), (2, 0, 0), (3, 1, 0)])
def test_the_commit_of_a_move_has_what_was_emitted_since(since: tuple[int, ...]) -> None:
    """Its target was told of the rest when it was asked. Only the choice without a token draws."""
    scheduler = prefill_scheduler()
    resumed = ((4, 5, 6), (8,), ())
    request = replace(spec("a", 3, n=3), resumed=resumed)
    scheduler.handle(replace(prefill_of(request), since=since), 0)
    tokens = [e for e in events(run(scheduler, (1, 2, 3))) if isinstance(e, Tokens)]
    assert [(one.choice, one.token_ids) for one in tokens] == [(2, (3,))]
    scheduler.handle(from_d(lent("a", 0)), 1)
    (commit,) = to_peer(scheduler.handle(written("a", 0), 1))
    assert isinstance(commit, Commit)
    assert commit.first_token_ids == (4, 8, 3)
    told = {(): (), (2, 0, 0): ((5, 6), (), ()), (3, 1, 0): resumed}
    assert commit.resumed == told[since]


def test_max_tokens_of_one_ends_by_length() -> None:
    scheduler = prefill_scheduler()
    scheduler.handle(prefill_of(spec("a", 3, max_tokens=1)), 0)
    tokens = [e for e in events(run(scheduler, (7,))) if isinstance(e, Tokens)]
    assert [(t.finish_reason, t.stop_token_id) for t in tokens] == [(FinishReason.LENGTH, None)]
    assert_gone(scheduler)


def test_a_failed_write_fails_the_request_and_fences() -> None:
    scheduler = writing()
    commands = scheduler.handle(written("a", 0, "region gone"), 2)
    assert events(commands) == [
        RequestFailed(key=key("a"), at_s=2, reason="transfer_failed", message="region gone"),
        Released(key=key("a"), at_s=2),
    ]
    assert to_peer(commands) == [TransferCancelled(key=key("a"), reason="transfer_failed")]
    assert_gone(scheduler)


def test_cancel_from_the_decode_worker_is_told_to_the_router() -> None:
    """A decode worker that has lost the reservation says nothing more to it."""
    scheduler = committing()
    commands = scheduler.handle(from_d(CancelTransfer(key=key("a"), reason="no room")), 2)
    assert events(commands) == [
        RequestFailed(key=key("a"), at_s=2, reason="transfer_cancelled", message="no room"),
        Released(key=key("a"), at_s=2),
    ]
    assert to_peer(commands) == [TransferCancelled(key=key("a"), reason="transfer_cancelled")]
    assert_gone(scheduler)


def test_cancel_of_what_is_not_here_is_fenced_at_once() -> None:
    scheduler = prefill_scheduler()
    assert scheduler.handle(from_d(CancelTransfer(key=key("a"), reason="why")), 0) == [
        SendPeer(peer=D, message=TransferCancelled(key=key("a"), reason="why"))
    ]


def test_cancel_while_a_write_is_in_flight_waits_and_is_told_once() -> None:
    scheduler = writing()
    cancel = from_d(CancelTransfer(key=key("a"), reason="no room"))
    assert names(scheduler.handle(cancel, 2)) == ["RequestFailed"]
    assert scheduler.handle(cancel, 2) == []
    assert names(scheduler.handle(written("a", 0), 3)) == ["Released"]
    assert_gone(scheduler)


@pytest.mark.parametrize("state", ["waiting", "on_device", "computed", "writing", "committing"])
def test_a_lost_peer_at_every_state(state: str) -> None:
    scheduler = prefill_scheduler()
    if state in ("writing", "committing"):
        scheduler = writing() if state == "writing" else committing()
    else:
        scheduler.handle(prefill_of(spec("a", 3)), 0)
    if state == "on_device":
        scheduler.handle(StepWanted(), 0)
    if state == "computed":
        run(scheduler, (9,))
    heard = names(scheduler.handle(PeerLost(peer=D, reason="gone"), 2))
    assert scheduler.handle(PeerLost(peer=D, reason="gone"), 2) == []
    assert scheduler.handle(Tick(), 2) == []
    if state == "on_device":
        heard += [name for name in names(done(scheduler, (9,))) if name != "prefill_chunk"]
    if state == "writing":
        heard += names(scheduler.handle(written("a", 0, "gone"), 3))
    assert heard == ["RequestFailed", "Released"]
    for late in (lent("a", 0), Committed(key=key("a"))):
        assert scheduler.handle(from_d(late), 4) == []
    assert_gone(scheduler)


def test_another_lost_peer_changes_nothing() -> None:
    scheduler = committing()
    assert scheduler.handle(PeerLost(peer=P, reason="gone"), 2) == []
    assert scheduler.jobs.handing_over == 1


def test_messages_that_no_healthy_peer_sends_change_nothing() -> None:
    scheduler = writing()
    assert scheduler.handle(from_d(Committed(key=key("a"))), 2) == []  # before the commit
    assert scheduler.handle(from_d(lent("a", 0)), 2) == []  # twice
    assert scheduler.handle(from_d(lent("a", 5)), 2) == []  # no such piece
    commit = to_peer(scheduler.handle(written("a", 0), 3))
    assert [type(m) for m in commit] == [Commit]
    assert scheduler.handle(from_d(lent("a", 0)), 3) == []  # once more, after it was sent
    names(scheduler.handle(from_d(Committed(key=key("a"))), 4))
    assert_gone(scheduler)


def renewed(scheduler: PrefillScheduler) -> list[str]:
    """By this tick."""
    keys = [
        one
        for m in to_peer(scheduler.handle(Tick(), 3))
        if isinstance(m, RenewLeases)
        for one in m.keys
    ]
    return [one.request_id for one in keys]


def test_a_tick_renews_what_waits_is_computed_or_moves_in_one_message() -> None:
    scheduler = writing("a")
    scheduler.handle(prefill_of(spec("b", 3)), 2)
    (renewal,) = scheduler.handle(Tick(), 2)
    assert isinstance(renewal, SendPeer) and renewal.addresses
    assert renewal.message == RenewLeases(keys=(key("a"), key("b")))
    scheduler.handle(StepWanted(), 2)
    assert renewed(scheduler) == ["a", "b"], "b is on the device"
    scheduler.handle(Abort(key=key("a")), 3)
    assert renewed(scheduler) == ["b"]


def test_what_waits_for_the_decode_worker_is_told_apart() -> None:
    """Its pieces are announced and computed; now a slab, and later the commit, is D's to answer."""
    scheduler = prefill_scheduler()
    scheduler.handle(prefill_of(spec("a", 3)), 0)
    run(scheduler, (9,))
    assert renewed(scheduler) == ["a"], "it was computed since the last tick"
    assert to_peer(scheduler.handle(Tick(), 1)) == [RenewLeases(keys=(), waiting=(key("a"),))]
    scheduler.handle(from_d(lent("a", 0)), 1)
    assert renewed(scheduler) == renewed(scheduler) == ["a"], "its write is under way"
    scheduler.handle(written("a", 0), 1)
    assert renewed(scheduler) == ["a"]
    assert renewed(scheduler) == []


def test_many_requests_are_renewed_in_messages_of_bounded_size() -> None:
    scheduler = prefill_scheduler(blocks=2000)
    for i in range(2 * MOST_RENEWED + 1):
        scheduler.handle(prefill_of(spec(f"r{i}", 3)), 0)
    messages = to_peer(scheduler.handle(Tick(), 1))
    assert [len(m.keys) for m in messages if isinstance(m, RenewLeases)] == [
        MOST_RENEWED,
        MOST_RENEWED,
        1,
    ]


def test_requests_fail_for_the_reason_for_which_the_peer_was_lost() -> None:
    scheduler = writing()
    lost = PeerLost(peer=D, reason="2 s", failure=FailureReason.TRANSFER_TIMEOUT)
    assert events(scheduler.handle(lost, 2)) == [
        RequestFailed(key=key("a"), at_s=2, reason="transfer_timeout", message="2 s")
    ]
    assert scheduler.tables.free_blocks < scheduler.tables.blocks, "the copy may still read them"
    assert names(scheduler.handle(written("a", 0, "gone"), 3)) == ["Released"]
    assert_gone(scheduler)


def test_a_known_prefix_is_sent_and_not_computed() -> None:
    """It travels at once; only what is new is run, and all of it is committed."""
    scheduler = prefill_scheduler()
    scheduler.handle(prefill_of(spec("a", 9)), 0)
    run(scheduler, ())
    run(scheduler, (9,))
    scheduler.handle(Abort(key=key("a")), 0)
    scheduler.handle(prefill_of(spec("b", 11)), 0)
    step = scheduler.handle(StepWanted(), 0)
    (only,) = the_step(step).batch.slices
    assert (only.start, only.token_ids) == (8, (8, 9, 10))
    (started,) = events(step)
    assert isinstance(started, Lifetime)
    assert (started.name, started.tokens) == ("prefill_started", 8)
    assert [(m.number, m.piece.span) for m in to_peer(step) if isinstance(m, PiecesAhead)] == [
        (0, TokenSpan(start=0, tokens=8, next_position=11)),
        (1, TokenSpan(start=8, tokens=3, next_position=11)),
    ]
    (write,) = scheduler.handle(from_d(lent("b", 0)), 1)
    assert isinstance(write, WriteSlab)
    scheduler.handle(written("b", 0), 2)
    assert not [c for c in done(scheduler, (9,)) if isinstance(c, SendPeer)]
    scheduler.handle(from_d(lent("b", 1)), 3)
    (commit,) = to_peer(scheduler.handle(written("b", 1), 4))
    assert isinstance(commit, Commit)
    assert commit.pieces == 2


def test_what_the_decode_worker_holds_is_not_sent() -> None:
    scheduler = prefill_scheduler()
    held = replace(prefill_of(spec("a", 11)), held_tokens=8)
    scheduler.handle(held, 0)
    assert not to_peer(scheduler.handle(StepWanted(), 0))
    done(scheduler, ())
    (announced,) = to_peer(scheduler.handle(StepWanted(), 0))
    assert isinstance(announced, PiecesAhead)
    assert announced.piece.span == TokenSpan(start=8, tokens=3, next_position=11)


def test_a_prompt_that_the_decode_worker_holds_whole_is_only_committed() -> None:
    scheduler = prefill_scheduler()
    scheduler.handle(replace(prefill_of(spec("a", 8)), held_tokens=8), 0)
    (commit,) = to_peer(run(scheduler, (9,)))
    assert isinstance(commit, Commit)
    assert (commit.pieces, commit.first_token_ids) == (0, (9,))


def test_prompts_of_different_tenants_are_computed_each() -> None:
    scheduler = prefill_scheduler()
    for tenant in ("x", "y"):
        request = replace(spec(tenant, 6), tenant=tenant)
        scheduler.handle(prefill_of(request), 0)
        (only,) = the_step(scheduler.handle(StepWanted(), 0)).batch.slices
        assert only.start == 0
        done(scheduler, (9,))
        scheduler.handle(Abort(key=key(tenant)), 0)


def test_a_chunk_has_room_behind_a_window() -> None:
    """The second prompt finds one block, and goes on in chunks of two tokens."""
    windowed = replace(LAYOUT.groups[0], window=4)
    layout = replace(LAYOUT, groups=(windowed,))
    scheduler = PrefillScheduler(lookup=local_lookup(BlockTables(layout, 16)), chunk_tokens=2)
    for name, prompt in (("a", tuple(range(9))), ("b", (*range(7), 99, 98))):
        scheduler.handle(prefill_of(replace(spec(name, 9), prompt_ids=prompt)), 0)
        steps = 0
        while len(scheduler.queue):
            step = the_step(scheduler.handle(StepWanted(), 0))
            (only,) = step.batch.slices
            assert len(only.tables[0]) * BLOCK >= only.start + len(only.token_ids)
            done(scheduler, (9,) if only.samples else ())
            steps += 1
        assert steps == (5 if name == "a" else 3)


# --- by way of the pool -------------------------------------------------------------------------


def pooled() -> tuple[PrefillScheduler, PoolUse]:
    """It hands over through the pool, in chunks of two blocks. The pool has nothing."""
    tables = BlockTables(LAYOUT, 16)
    tables.device.reports = True
    cost = RestoreCost(BLOCK)
    pool = PoolUse(tables, cost)
    lookup = PrefixLookup(tables=tables, cost=cost, pool=pool)
    scheduler = PrefillScheduler(lookup=lookup, chunk_tokens=2 * BLOCK, mode=HandoffMode.POOL)
    scheduler.handle(hello(D), 0)
    scheduler.handle(prefill_of(spec("a", 5 * BLOCK + 1)), 0)
    return scheduler, pool


def chunk(scheduler: PrefillScheduler, pool: PoolUse, *sampled: int) -> OfferBlocks:
    """The next chunk runs, and its blocks are offered to the pool."""
    scheduler.handle(StepWanted(), 0)
    told = to_peer(done(scheduler, sampled))
    offer = pool.write_behind.offer(0)
    assert offer is not None and told == []
    return offer


def confirm(scheduler: PrefillScheduler, pool: PoolUse, offer: OfferBlocks) -> list[PeerMessage]:
    pool.write_behind.settled(offer.offer)
    pool.write_behind.confirmed(offer.offer)
    return to_peer(scheduler.handle(OfferConfirmed(offer=offer.offer), 0))


def test_with_pool_the_decode_worker_hears_what_is_stored_so_far_and_then_the_commit() -> None:
    scheduler, pool = pooled()
    first = chunk(scheduler, pool)
    assert confirm(scheduler, pool, first) == [PrefixStored(key=key("a"), tokens=2 * BLOCK)]
    second, third = chunk(scheduler, pool), chunk(scheduler, pool, 7)
    assert renewed(scheduler) == ["a"] and to_peer(scheduler.handle(Tick(), 0)) == []
    assert confirm(scheduler, pool, third) == [], "it lies behind blocks that are on their way"
    assert renewed(scheduler) == ["a"], "but the pool goes on"
    stored, commit = confirm(scheduler, pool, second)
    assert stored == PrefixStored(key=key("a"), tokens=5 * BLOCK)
    assert commit == Commit(key=key("a"), pieces=0, first_token_ids=(7,))
    scheduler.handle(from_d(Committed(key=key("a"))), 0)
    assert_gone(scheduler)


def test_what_the_pool_has_already_is_told_with_the_first_chunk() -> None:
    scheduler, pool = pooled()
    confirm(scheduler, pool, chunk(scheduler, pool))
    scheduler.handle(Abort(key=key("a")), 0)
    scheduler.handle(prefill_of(spec("b", 3 * BLOCK + 1)), 0)
    scheduler.handle(StepWanted(), 0)
    assert to_peer(done(scheduler, (7,))) == [PrefixStored(key=key("b"), tokens=2 * BLOCK)]


def test_a_grammar_that_can_not_be_followed_ends_its_request_alone() -> None:
    scheduler = prefill_scheduler()
    for name in ("a", "b"):
        scheduler.handle(prefill_of(spec(name, 3, max_tokens=9)), 0)
    step = the_step(scheduler.handle(StepWanted(), 1))
    assert [piece.key.request_id for piece in step.batch.slices] == ["a", "b"]
    outcome = StepOutcome(
        sampled=((Sampled(token_id=7),), (Sampled(token_id=8),)), failed={0: "too complex"}
    )
    heard = events(scheduler.handle(StepDone(outcome=outcome, seconds=0.1), 2))
    assert [one for one in heard if isinstance(one, RequestFailed)] == [
        RequestFailed(key=key("a"), at_s=2, reason="grammar", message="too complex")
    ]
    told = [one for one in heard if isinstance(one, Tokens)]
    assert [(one.key, one.token_ids) for one in told] == [(key("b"), (8,))]
    assert key("a") not in scheduler.jobs and key("b") in scheduler.jobs
